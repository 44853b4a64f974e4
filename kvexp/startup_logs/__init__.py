"""Start-up logs of engines, read into records."""
