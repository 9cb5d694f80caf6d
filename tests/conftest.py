"""Tests interrupt what they start as a terminal does, also where the whole test run is in the background: a shell lets
those ignore Ctrl-C, and every process they start inherits that.

Where tests run side by side (`make test`), those with a real Ray cluster are one group, in one process: two clusters at
once on two cores would only time each other out.
"""

import signal

import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name.startswith("test_ray_") or "[ray_gpu" in item.name:
            item.add_marker(pytest.mark.xdist_group("ray"))
