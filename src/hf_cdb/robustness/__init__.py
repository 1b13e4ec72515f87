"""What wrong exit predictions cost: noise, drift, exit rules, KV policies, positions and classes of tokens."""
