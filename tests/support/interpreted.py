"""Where Triton kernels run in tests: on a CUDA device, or interpreted on the CPU. To be imported before any kernel.

It also makes Triton 3.6's interpreter take NumPy 2.4, and fast enough for tests.
"""

import os

import torch

ON_GPU = torch.cuda.is_available()
IS_INTERPRETED = not ON_GPU and os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda:0" if ON_GPU else "cpu")

if IS_INTERPRETED:
    from triton.runtime import interpreter

    _patch_tensor = interpreter._patch_lang_tensor

    def _with_index(tensor, scope):
        """int() of one-element arrays, as bounds of loops need, is refused by NumPy 2.4."""
        _patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _with_index

    _patched = set()

    def _call(self, *args, **kwargs):
        """What a kernel calls. Each call would patch the language anew, which takes longer than most calls."""
        module = self.fn.__module__
        if module not in _patched:
            _patched.add(module)
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = _call
