"""What a run will need before it is paid for: the real step, compiled ahead of time for a device that is not there."""
