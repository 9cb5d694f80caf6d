"""Speed and memory, measured: each module has `run(quick) -> list[Row]`, `__main__` runs them all."""
