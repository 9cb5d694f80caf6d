"""The incident: P1 train=[0] infer=[0,1], P2 train=[1] infer=[0,1]. The world is in files/overlap_2gpu.yaml."""

from scenarios.common import main

if __name__ == "__main__":
    raise SystemExit(main("overlap_2gpu"))
