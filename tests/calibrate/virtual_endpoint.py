"""An emulated replica as an endpoint of probes, without sockets and without waiting."""

import numpy as np

from emulate.virtual import VirtualClock, new_replica
from tailrace.calibrate.probes import Reply
from tailrace.emulate import tokenizer


class VirtualEndpoint:
    """Answers in virtual time; ``overhead_s`` passes before a token reaches the client.

    ``noise_s``: mean of a further, random delay of each token. ``hiccup``: share of the probes that
    take three times as long.
    """

    def __init__(self, config, overhead_s=0.0, noise_s=0.0, hiccup=0.0, stagger_s=1e-4, seed=0):
        self.clock = VirtualClock()
        self.replica = new_replica(config, self.clock)
        self.overhead_s, self.noise_s, self.hiccup = overhead_s, noise_s, hiccup
        self.stagger_s = stagger_s
        self.rng = np.random.default_rng(seed)
        self.asked = []

    def now(self):
        return self.clock.now()

    async def ask(self, probe):
        self.asked.append(probe)
        start = self.clock.now()
        found = [([], 0) for _ in range(probe.batch)]
        jobs = {}

        def send(k):
            key = int(self.rng.integers(2**62))
            prompt = tokenizer.words(key, 0, probe.prompt)
            answer = tokenizer.words(key + 1, 0, probe.outputs)
            times = found[k][0]
            jobs[k] = self.replica.submit(prompt, answer, lambda *_: times.append(self.now()))

        for k in range(probe.batch):
            self.clock.call_at(start + k * self.stagger_s, lambda k=k: send(k))
        self.clock.run()
        slow = 3.0 if self.rng.random() < self.hiccup else 1.0
        replies = []
        for k in range(probe.batch):
            sent = start + k * self.stagger_s
            late = self.overhead_s + self.rng.exponential(self.noise_s or 1e-12, len(found[k][0]))
            times = np.sort(sent + slow * (np.array(found[k][0]) - sent) + late)
            replies.append(Reply(sent, times, probe.prompt, jobs[k].cached_tokens))
        return replies
