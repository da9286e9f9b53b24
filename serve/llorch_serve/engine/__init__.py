"""The loop that makes tokens: schedule, run, sample, update. Knows no runtime and no front."""
