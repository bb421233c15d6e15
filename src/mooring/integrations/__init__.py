"""Integrations with training libraries; each module needs its library, and the core needs none of them."""
