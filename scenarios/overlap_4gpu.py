"""P1 train=[0] infer=[0,1,2], P2 train=[3] infer=[1,2,3]. The world is in files/overlap_4gpu.yaml."""

from scenarios.common import main

if __name__ == "__main__":
    raise SystemExit(main("overlap_4gpu"))
