"""Predictions against what engines printed: records of start-up logs, one by one and in summary."""
