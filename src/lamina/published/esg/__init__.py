"""ESG (HPDC 2024) and its rivals INFless, Orion and Aquatope: search over configurations, queues per step, invokers."""
