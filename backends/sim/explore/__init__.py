"""The explorer: many worlds, every order, every fault. See docs/exploring.md.

Everything about one run is data (`case.Case`), drawn from a seed before the run begins, so that it can be saved,
replayed bit for bit and shrunk:

    worlds, swarm, guests -> a case -> judge (strategies choose the order) -> a finding -> shrink -> artefact

`campaign` does that for many seeds on many cores; `scenarios.explore` is its command line.
"""
