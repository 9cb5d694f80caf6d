"""Two pipelines learn on shared GPUs, quickly enough for a CPU. The world is in files/learn_2gpu.yaml."""

from scenarios.common import main

if __name__ == "__main__":
    raise SystemExit(main("learn_2gpu"))
