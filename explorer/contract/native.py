"""The transformers model without any instrumentation, which served values are compared with."""

from __future__ import annotations

import copy
import inspect
from functools import cached_property
from typing import Any

import torch

from explorer.meta_device import cache_of


class NativeModel:
    """A transformers model called as any user calls it, on fixed token ids [batch seq].

    The properties say what the plain model does, so that an invariant asks no more of the
    served values than the model keeps. hf: the model. attention_only: whether softmax attention is
    its only mixer.
    """

    def __init__(self, hf: Any, ids: torch.Tensor, attention_only: bool) -> None:
        self.hf, self.ids = hf, ids
        self._attention_only = attention_only
        self._caches: dict[int, Any] = {}

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        """Return the output of a plain forward without gradients."""
        with torch.no_grad():
            return self.hf(input_ids, **kwargs)

    @cached_property
    def logits(self) -> torch.Tensor:
        """The logits [batch seq vocab_size] of the ids."""
        return self.forward(self.ids).logits

    @property
    def runs(self) -> bool:
        """Whether it runs at all: some models keep modules in float32 that reject bfloat16."""
        try:
            return self.logits is not None
        except RuntimeError:
            return False

    @cached_property
    def uses_mask(self) -> bool:
        """Whether an attention mask changes the logits."""
        mask = torch.ones_like(self.ids)
        mask[:, :2] = 0
        return not torch.equal(self.forward(self.ids, attention_mask=mask).logits, self.logits)

    @cached_property
    def causal(self) -> bool:
        """Whether no logits depend on a later token.

        Some models select what to attend to from the whole text.
        """
        ids = self.ids.clone()
        ids[:, -1] = (ids[:, -1] + 1) % self.logits.shape[-1]
        logits = self.forward(ids).logits
        return torch.allclose(logits[:, :-1], self.logits[:, :-1], rtol=1e-4, atol=1e-5)

    @cached_property
    def rows_independent(self) -> bool:
        """Whether a row of a batch gets the logits it gets alone."""
        logits = self.forward(self.ids[:1]).logits
        return torch.allclose(logits, self.logits[:1], rtol=1e-3, atol=1e-4)

    @cached_property
    def differentiable(self) -> bool:
        """Whether autograd works on it: some forwards overwrite tensors that the backward needs."""
        try:
            with torch.enable_grad():
                self.hf(self.ids).logits.float().sum().backward()
        except RuntimeError:
            return False
        finally:
            self.hf.zero_grad(set_to_none=True)
        return True

    # -- continuing from a cache ------------------------------------------------

    @cached_property
    def returns_cache(self) -> bool:
        """Whether a forward returns its cache, so that another can continue from it."""
        return cache_of(self.forward(self.ids, use_cache=True)) is not None

    def cache_after(self, length: int) -> dict[str, Any]:
        """Return a cache that holds the first ``length`` tokens, as the keyword argument of a call;
        a fresh copy each time.
        """
        if length not in self._caches:
            found = cache_of(self.forward(self.ids[:, :length], use_cache=True))
            assert found is not None  # where `returns_cache`
            self._caches[length] = found
        return copy.deepcopy(self._caches[length])

    def continuation(self, start: int, stop: int | None = None) -> dict[str, torch.Tensor]:
        """Return the inputs of tokens ``start`` to ``stop``, by default of one token."""
        stop = start + 1 if stop is None else stop
        inputs = {"input_ids": self.ids[:, start:stop]}
        if self._attention_only:
            # Recurrent mixers multiply their input with the mask, so it cannot be longer.
            inputs["attention_mask"] = torch.ones_like(self.ids[:, :stop])
        if "position_ids" in inspect.signature(type(self.hf).forward).parameters:
            positions = torch.arange(start, stop, device=self.ids.device)
            inputs["position_ids"] = positions.expand(len(self.ids), -1)
        return inputs

    def continues(self, start: int, stop: int) -> bool:
        """Return whether tokens run on a cache of those before get the logits of a full forward.

        Some kernels take no state together with several tokens: they start afresh, or raise.
        """
        if not self.returns_cache:
            return False
        try:
            output = self.forward(
                **self.continuation(start, stop), **self.cache_after(start), use_cache=True
            )
        except (RuntimeError, ValueError):
            return False
        expected = self.logits[:, start:stop].float()
        scale = float(self.logits.abs().max())
        return torch.allclose(output.logits.float(), expected, rtol=1e-3, atol=1e-3 * scale)
