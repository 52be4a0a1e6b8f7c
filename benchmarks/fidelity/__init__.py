"""The simulator against live runs: the same calls at the same times, latencies from profiles alone.

`python -m benchmarks.fidelity [emulated] [cpu] [replay [FILE...]]` writes what it found into results/prediction-fidelity.json.

- `emulated`: published profiles of a V100 on real timers, through the loop, the controller and the policy that serve.
- `cpu`: a function in a worker process. It is measured on the engine that serves it, before, between and after the loads, since
  a shared machine is another one a minute later.
- `replay`: what `python -m benchmarks.fidelity.gpu FILE` has recorded on a GPU machine, likewise, simulated here; without a
  file, the recordings of `data/live-h200`.

Each load is then simulated with the profile of the measurements around it, and medians, tails and attainment stand side by
side. How late the generator's own timers came is told with it: a machine busy with something else is no witness.
"""
