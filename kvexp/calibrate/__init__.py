"""`python -m kvexp.calibrate`: measure a card and write its device profile.

`card` is the border to torch and the GPU, `probes` what is run there and what numbers follow from
it, `writing` the file and the comparison with the profile that is packaged.
"""
