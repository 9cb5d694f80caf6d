"""From the log of a real run to a world that the simulator runs: durations measured, fitted, written, compared."""
