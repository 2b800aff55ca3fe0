"""Serves IBM Granite 3, a Llama with four multipliers: --model-family granite_family:Granite."""

from typing import Any


class Granite:
    """Folders with ``GraniteForCausalLM``, as Llama with the multipliers added."""

    def config(self, raw: dict[str, Any]) -> dict[str, Any]:
        """Return the config.json of the Llama that has these weights."""
        if raw.get("architectures") != ["GraniteForCausalLM"]:
            raise ValueError(f"this serves GraniteForCausalLM, not {raw.get('architectures')}")
        return {**raw, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}

    def decoder(self, raw: dict[str, Any], base: type) -> type:
        """Return Baton's decoder with the multipliers of this folder."""
        added = raw.get("residual_multiplier", 1.0)

        class GraniteDecoder(base):
            def __init__(self, *arguments, **options):
                super().__init__(*arguments, **options)
                self._scale = raw.get("attention_multiplier", 1.0)
                self._final_norm = self._final_norm / raw.get("logits_scaling", 1.0)

            def _embed(self, tokens, residual):
                super()._embed(tokens, residual)
                residual *= raw.get("embedding_multiplier", 1.0)

            def _add_attention(self, layer, delta, residual, normed):
                delta *= added
                super()._add_attention(layer, delta, residual, normed)

            def _mlp(self, layer, residual, normed, following, deep=()):
                rows, width = len(normed), self.config.intermediate_size
                gate_up = self._space.rows("gate_up", rows, 2 * width)
                active = self._space.rows("active", rows, width)
                delta = self._space.rows("delta", rows, self.config.hidden_size)
                self.backend.gated_mlp(normed, layer.gate_up, layer.down, gate_up, active, delta)
                delta *= added
                eps = self.config.rms_norm_eps
                self.backend.add_rms_norm(delta, residual, following, eps, normed)

        return GraniteDecoder
