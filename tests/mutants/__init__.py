"""The tester is tested: faults put into core and simulator on purpose, and which of the four detectors finds each.

    python -m tests.mutants                         every mutant through every detector, with a table at the end
    python -m tests.mutants reservation-off         one of them
    python -m tests.mutants --by verifier           one detector

A mutant is one replaced piece of text in a *copy* of the packages; the product knows nothing of it. `table` has them,
`tree` makes the copy, `detectors` starts a child process in it for each detector, `probe` is that child, `results`
keeps what came of it and writes docs/mutants.md.
"""
