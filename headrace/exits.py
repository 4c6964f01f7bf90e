"""The exit codes of every command."""

from __future__ import annotations

OK = 0
PROBLEM = 1
USAGE = 2
NOT_RUNNING = 3
NEEDS_PRIVILEGE = 4
INTERRUPTED = 130
