"""Input checks, resolved options, output streams, recovery, watchdog and counters of the engine."""
