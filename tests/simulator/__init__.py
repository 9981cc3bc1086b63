"""Several processes on one PostgreSQL, simulated: clock, network and database are a model, the processes are the real
application. `python -m tests.simulator --help`; docs/inside/simulator.md says what is checked."""
