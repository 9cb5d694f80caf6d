"""Nothing shared: P1 on GPUs 0 and 1, P2 on 2 and 3. The world is in files/disjoint_4gpu.yaml."""

from scenarios.common import main

if __name__ == "__main__":
    raise SystemExit(main("disjoint_4gpu"))
