"""Small worlds proved whole: every reachable state of the real `decide`, under every order of what may happen.

Read in this order: `world` (which world, and how time is abstracted), `client` (what a pipeline may say next), `moves`
(everything that may happen next), `layout`, `packing` and `loading` (a state as a few dozen bytes, and back), `rules`
(what must hold in each), `symmetry` (states that differ in names alone), `search` (all of them), `liveness` (nobody
waits for ever), `story` (a counterexample in words).

1. Nothing here decides anything: each transition is one call of `core.scheduler.decide`.
2. A state is its packed bytes. What is not in them must not matter: tests/test_verify.py walks states that were never
   packed beside their packed twins and demands the same behaviour.
3. No clock, no randomness, no tasks: the same world gives the same graph, state by state.
"""
