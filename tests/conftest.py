"""Tests interrupt what they start as a terminal does, also where the whole test run is in the background: a shell lets
those ignore Ctrl-C, and every process they start inherits that."""

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
