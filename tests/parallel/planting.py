"""Plants a bug in the executor of this process by changing one place of its source."""

import inspect

import pentatron.parallel.executor as executor_module

BUGS = {
    "a micro-batch is dropped": (
        "if saved.start is not None:",
        "if saved.start is not None and micro_batch != 1:",
    ),
    "gradients of two micro-batches are swapped": (
        "self.messages.post_send(value.detach(), action.peer, action)",
        "swapped = Action(action.kind, action.stage, action.micro_batch ^ (action.kind is Kind.SEND_GRADIENT))\n"
        "        self.messages.post_send(value.detach(), action.peer, swapped)",
    ),
    "the gradient of the input is lost": ("if input_gradient is None else input_gradient", ""),
    "the loss is taken twice": ("self.loss_sum += output.detach()", "self.loss_sum += 2 * output.detach()"),
    "the hand-over is not detached": (
        "self.activations[cell] = output.detach()",
        "self.activations[cell] = output",
    ),
    "a deferred weight gradient is lost": (
        "self.deferred.compute((action.stage, action.micro_batch))",
        "cell = (action.stage, action.micro_batch)\n"
        "        self.deferred.compute(cell) if cell[1] != 1 else self.deferred._pending.pop(cell)",
    ),
    "weight gradients are forgotten": (
        "self.deferred.compute((action.stage, action.micro_batch))",
        "pass",
    ),
    # Combines the inputs of one pending micro-batch with the gradient of another of the same stage.
    "the weight gradient of another micro-batch": (
        "self.deferred.compute((action.stage, action.micro_batch))",
        "same = [c for c in self.deferred.cells if c[0] == action.stage]\n"
        "        own, other = self.deferred._pending[same[0]], self.deferred._pending[same[-1]]\n"
        "        own[:] = [type(p)(p.weight, p.function, p.gradient, q.inputs) for p, q in zip(own, other)]\n"
        "        self.deferred.compute((action.stage, action.micro_batch))",
    ),
    "the last flag comes early": (
        "return self.backwards_left[stage] == 0",
        "return self.backwards_left[stage] == 1",
    ),
    "nothing is released": ("saved = self.saved.pop(cell)", "saved = self.saved[cell]"),
    "the output is kept": (
        "self.saved[cell] = _SavedForward(received, start)",
        "self.saved[cell] = _SavedForward(received, start); self.program.kept.append(output)",
    ),
    "sends are kept to the end": ("self.messages.delivered(delivered)", "pass"),
    "no agreement": ("self.messages.agree(", "(lambda *ignored: None)("),
}


def plant(bug: str) -> None:
    right, wrong = BUGS[bug]
    source = inspect.getsource(executor_module)
    assert source.count(right) == 1, f"{bug}: the place to break is there {source.count(right)} times"
    changed = compile(source.replace(right, wrong), executor_module.__file__, "exec")
    exec(changed, executor_module.__dict__)
