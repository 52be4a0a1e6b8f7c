"""`python -m benchmarks.prediction`: how good the predictors are, and how fast. See `__main__.py`."""
