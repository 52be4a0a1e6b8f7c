"""The simulator against live runs: the same calls at the same times, latencies from profiles alone.

`python -m benchmarks.fidelity [emulated] [cpu] [gpu FILE]` writes what it found into results/prediction-fidelity.json.

- `emulated`: published profiles of a V100 on real timers, through the loop, the controller and the policy that serve.
- `cpu`: a function in a worker process. It is measured on the engine that serves it, before, between and after the loads, since
  a shared machine is another one a minute later.
- `gpu`: what `python -m benchmarks.fidelity.gpu FILE` has measured on a GPU machine, likewise, simulated here.

Each load is then simulated with the profile of the measurements around it, and medians, tails and attainment stand side by
side. How late the generator's own timers came is told with it: a machine busy with something else is no witness.
"""
