"""Real servers for the demo and the tests: a DNS upstream and inference edges that misbehave on request."""

from headrace.lab.lab import Lab
from headrace.lab.settings import DaemonPorts, EdgeEntry, Settings

__all__ = ["DaemonPorts", "EdgeEntry", "Lab", "Settings"]
