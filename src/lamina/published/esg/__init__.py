"""ESG (HPDC 2024) and the rivals its authors compared it with: search, deadline split, invokers."""
