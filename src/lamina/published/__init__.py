"""Published systems, one folder per paper: its algorithms, its policies, its data reader, and a README with its claims.

Nothing in the product imports them. A policy is `published/<paper>/policies/<name>.py` and is found by its file name, without an
import, like those in `policies/`; an offline planner for `lamina plan` is `published/<paper>/offline.py`.
"""
