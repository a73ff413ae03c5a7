"""What another routing policy would gain on a user's own servers and traffic, and how to adopt it.

``assessment`` replays recorded traffic under every policy. ``live`` records it through a router
that runs as a child process (``processes``), ``loads`` makes traffic up where there is none, and
``rollout`` has the steps after that: fine-tuning, proof, shadow, take-over.
"""
