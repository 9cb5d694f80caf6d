"""One detector at work on the tree it is started in. The child process of `detectors`: never run by hand.

    python -m tests.mutants.probe DETECTOR MODULE ANSWER SEEDS CPU_SECONDS

MODULE is the mutated one. A detector that never loads it cannot find anything there: it says so at once, and is *blind*
to that mutant. The answer is written as JSON whatever happens; one that runs out of processor time leaves none.
"""

import json
import os
import resource
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

MEMORY_MOST = 6 << 30
"""Bytes of address space: a mutant may collect without end."""
ASLEEP_S, ASLEEP_CPU_S = 120, 0.5
"""A test that does nothing for so long, by the clock and by the processor, sleeps for ever. On a busy machine others
take long too."""
TEST_CPU_S = 15
"""Of the unit detector: a test takes a second, or it goes round in circles."""
SEED_CPU_S = 15
"""A run of one seed takes a second, or it hangs."""
STATES_MOST = 60_000
"""More than any of the worlds has; a mutant may have made one endless."""

UNIT = (
    "test_planner", "test_scheduler", "test_gateway", "test_topology", "test_service", "test_restore", "test_driver",
    "test_pipeline", "test_backend_contract", "test_sim_world", "test_sim_faults", "test_incidents",
    "test_incidents_rollouts", "test_incidents_faults",
)  # fmt: skip
"""Test files, the fast ones first."""
SLOW = "i26 or i48 or at_no_moment or pricing_again or ray_gpu"
"""And i48 interrupts a real process: on a busy machine it may fail by itself."""
PROPERTY = ("test_core_walk", "test_planner", "test_gateway", "test_core_machine")
OTHER_MACHINES = "TestFloor"
HISTORIES = 15
"""Of the core machine; the tests themselves try 120."""

Answer = dict[str, Any]


def unit(module: str, seeds: int) -> Answer:
    return _pytest(Watch(module, TEST_CPU_S), UNIT, "not hypothesis", f"not ({SLOW})")


def property_(module: str, seeds: int) -> Answer:
    os.environ["TURNSTILE_NO_SHRINK"] = "1"  # that there is a counterexample is enough
    return _pytest(Watch(module), PROPERTY, "hypothesis", f"not {OTHER_MACHINES}")


class Watch:
    """A pytest plugin: what failed first, and whether the mutant was there at all."""

    def __init__(self, module: str, test_cpu_s: float = 0) -> None:
        """`test_cpu_s`: limit of one test in seconds of processor time; 0: none."""
        signal.signal(signal.SIGALRM, self._asleep)
        signal.signal(signal.SIGPROF, lambda *_: self._give_up("it goes round in circles"))
        self.module = module
        self.test_cpu_s = test_cpu_s
        self.running = ""
        self.failed = ""
        self.why = ""
        self.blind = False
        self.seen_s = 0.0

    def pytest_collection_finish(self, session: Any) -> None:
        from hypothesis import settings

        if self.module and self.module not in sys.modules and not self.failed:
            self.blind = True
            session.shouldstop = "blind"
        for item in session.items:
            machine = getattr(item, "cls", None)
            if hasattr(machine, "settings"):
                machine.settings = settings(machine.settings, max_examples=HISTORIES)

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self.running = nodeid.rpartition("::")[2]
        signal.setitimer(signal.ITIMER_PROF, self.test_cpu_s)
        self._watch()

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)

    def _watch(self) -> None:
        self.seen_s = time.process_time()
        signal.alarm(ASLEEP_S)

    def _asleep(self, *_: Any) -> None:
        if time.process_time() - self.seen_s > ASLEEP_CPU_S:
            self._watch()
        else:
            self._give_up("it waits for ever")

    def _give_up(self, why: str) -> None:
        write({"found": True, "how": self.running, "why": why})
        os._exit(0)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.failed = self.failed or f"{report.nodeid} cannot be collected"

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid.rpartition("::")[2]
            crash = getattr(report.longrepr, "reprcrash", None)
            self.why = str(crash.message).partition("\n")[0][:200] if crash else ""


def _pytest(watch: Watch, names: tuple[str, ...], marked: str, named: str) -> Answer:
    import pytest

    files = [file for name in names if Path(file := f"tests/{name}.py").exists()]
    pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-m", marked, "-k", named, *files], plugins=[watch])
    return {"found": bool(watch.failed), "how": watch.failed, "why": watch.why, "blind": watch.blind}


def explorer(module: str, seeds: int) -> Answer:
    """Every class of fault and the whole portfolio of orders, as `scenarios.explore`; nothing is shrunk."""
    from backends.sim.explore.campaign import Plan, explore
    from backends.sim.explore.swarm import CLASSES
    from scenarios import explore as command  # whatever the command line loads

    assert command
    if module and module not in sys.modules:
        return {"found": False, "blind": True}
    plan = Plan(classes=tuple(CLASSES))
    hits, done, rules = 0, 0, Counter[str]()
    signal.signal(signal.SIGPROF, signal.default_int_handler)
    for seed in range(seeds):
        signal.setitimer(signal.ITIMER_PROF, SEED_CPU_S)
        found: list[str] = []
        try:
            found = [failure.finding.rule for failure in explore(plan, seed).failures]
        except KeyboardInterrupt:
            found = ["hung"]
        except Exception as error:
            found = [f"crash {type(error).__name__}"]
        signal.setitimer(signal.ITIMER_PROF, 0)
        done += 1
        hits += bool(found)
        rules.update(sorted(set(found)))
        if "hung" in rules:
            break  # a loop torn out of its run leaves nothing to go on with
    return {"found": hits > 0, "how": ", ".join(sorted(rules)), "hits": hits, "seeds": done}


def verifier(module: str, seeds: int) -> Answer:
    """Two pipelines on one GPU, step by step; on two GPUs; then faults."""
    from core.verify.proof import BROKEN, STUCK, prove
    from core.verify.search import Graph
    from core.verify.world import World

    if module and module not in sys.modules:
        return {"found": False, "blind": True}
    unfinished = ""
    for world in (World(gpus=1), World(gpus=1, pipelines=1, faults=2), World(coarse=True)):
        try:
            verdict = prove(Graph(world), STATES_MOST)
        except Exception as error:
            return {"found": True, "how": f"crash: {type(error).__name__}: {error}"[:200]}
        if verdict.outcome in (BROKEN, STUCK):
            return {"found": True, "how": verdict.outcome, "why": verdict.story[-1] if verdict.story else ""}
        if verdict.outcome != "proved":
            unfinished = verdict.outcome
    return {"found": False, "how": unfinished}


PROBES = {"unit": unit, "property": property_, "explorer": explorer, "verifier": verifier}


def main(detector: str, module: str, _: str, seeds: str, cpu: str) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (int(cpu), int(cpu) + 5))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_MOST, MEMORY_MOST))
    import core

    here = Path(core.__file__).resolve()
    assert here.is_relative_to(Path.cwd().resolve()), f"this is not the copy: {here}"
    try:
        made = PROBES[detector](module, int(seeds))
    except Exception as error:  # the packages do not even load
        made = {"found": True, "how": f"crash {type(error).__name__}: {error}"[:200]}
    write(made)


def write(made: Answer) -> None:
    Path(sys.argv[3]).write_text(json.dumps(made | {"cpu_s": round(time.process_time(), 1)}), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
