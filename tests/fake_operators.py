"""Operators for the chooser's tests: y = x wᵀ on the CPU, with variants that are slow, wrong, broken or that hang."""

import os
import time

import mlx.core as mx


class Fake:
    rows, together = (1, 4, 32), 136

    def __init__(self, *variants: str, name: str = "fake", slow_stock: bool = False, raced: bool = True):
        self.ours, self.raced = variants, raced
        self.name = name
        self.slow_stock = slow_stock
        self.lost = False
        self.address = f"fake_operators:{'_'.join(variants if raced else ('checked', *variants))}"

    def variants(self, key):
        return self.ours

    def small(self, key):
        return {**key, "N": 8}

    def nbytes(self, key):
        return 2**28

    def tolerance(self, key):
        return 1e-5

    def inputs(self, key, rows, seed, exact):
        x, w = mx.random.split(mx.random.key(seed))
        return mx.random.normal((rows, key["K"]), key=x), mx.random.normal((key["N"], key["K"]), key=w)

    def run(self, variant, inputs):
        x, w = inputs
        self.lost = self.lost or variant == "faults"
        if self.lost:
            raise RuntimeError("[METAL] Command buffer execution failed: Caused GPU Timeout Error")
        if variant == "slow" or (variant == "stock" and self.slow_stock):
            time.sleep(0.02)
        elif variant == "stock" and variant in self.ours:
            return x @ w.T + 1e-3
        elif variant == "hangs":
            time.sleep(3600)
        elif variant == "broken":
            raise RuntimeError("unknown type name 'bfloot'")
        elif variant == "dies":
            os._exit(3)
        elif variant == "wrong":
            return x @ w.T + (x.shape[0] == 4)
        return x @ w.T


quick = Fake("quick", slow_stock=True)
slow = Fake("slow")
wrong = Fake("wrong", slow_stock=True)
hangs = Fake("hangs")
broken = Fake("broken")
dies = Fake("dies")
stock_slow = Fake("stock", "slow")
faults_quick = Fake("faults", "quick", slow_stock=True)
checked_slow = Fake("slow", raced=False)
checked_wrong = Fake("wrong", raced=False)
checked_wrong_quick = Fake("wrong", "quick", raced=False)
hangs_quick = Fake("hangs", "quick", slow_stock=True)
