"""Text files of a model that takes images: the demo model's tokenizer with tokens for images."""

import json
from pathlib import Path

DEMO = Path(__file__).parents[2] / "deploy" / "demo_model"
START, PAD, END = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"

TEMPLATE = """\
{% for message in messages %}<|{{ message.role }}|>
{% if message.content is string %}{{ message.content }}\
{% else %}{% for part in message.content %}\
{% if part.type == 'image' or 'image' in part or 'image_url' in part %}\
<|vision_start|><|image_pad|><|vision_end|>\
{% elif 'text' in part %}{{ part.text }}{% endif %}{% endfor %}{% endif %}
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""
"""In the manner of the template of Qwen2.5-VL."""

PREPROCESSOR = {"min_pixels": 28 * 28 * 4, "max_pixels": 28 * 28 * 16}


def vision_files(ids=None, preprocessor=PREPROCESSOR):
    """Return the files by name. ``ids``: of the three image tokens, default after all others."""
    tokenizer = json.loads((DEMO / "tokenizer.json").read_text())
    known = [*tokenizer["model"]["vocab"].values(), *(t["id"] for t in tokenizer["added_tokens"])]
    ids = ids or range(max(known) + 1, max(known) + 4)
    for index, content in zip(ids, (START, PAD, END), strict=True):
        tokenizer["added_tokens"].append(
            {
                "id": index, "content": content, "single_word": False, "lstrip": False,
                "rstrip": False, "normalized": False, "special": True,
            }
        )  # fmt: skip
    return {
        "tokenizer.json": json.dumps(tokenizer).encode(),
        "tokenizer_config.json": (DEMO / "tokenizer_config.json").read_bytes(),
        "chat_template.jinja": TEMPLATE.encode(),
        "preprocessor_config.json": json.dumps(preprocessor).encode(),
    }
