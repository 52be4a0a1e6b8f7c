"""ESG and the rivals its authors compared it with: search, split deadlines, invokers."""
