"""Images of the native client: parts of messages, placeholders, and the context they become."""

import base64
import io

import numpy as np
import pytest
from msgspec.structs import replace
from PIL import Image

from baton.client.calls import Draft, Whole
from baton.client.description import Description
from baton.client.model import ServedModel
from baton.client.options import check_options, options_of_each
from baton.images import processor
from baton.images.processor import ImageProcessor
from baton.proto.contexts.images import image_hash
from baton.proto.errors import CheckpointError, InputError
from baton.proto.layout import KVLayout, ModelCard
from baton.proto.requests import check_wire_context
from baton.proto.sampling import SamplingParams
from baton.proto.wire.wire_context import WireContext, WireVisionContext

from ..images.cases import TILES
from ..images.model_files import PAD, vision_files

CARD = ModelCard(
    name="seer", architecture="x", fingerprint="x", numerics="x", vocab_size=2048, max_length=400,
    eos_token_ids=[2], layout=KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=16),
    kinds=["TextContext", "TextAndVisionContext"],
)  # fmt: skip


def picture(height=56, width=84, value=90):
    content = io.BytesIO()
    Image.fromarray(np.full((height, width, 3), value, np.uint8)).save(content, "PNG")
    return content.getvalue()


A, B = picture(), picture(84, 84, 30)
A_TOKENS, B_TOKENS = 6, 9


def data_url(content):
    return "data:image/png;base64," + base64.b64encode(content).decode()


@pytest.fixture(scope="module")
def model():
    model = ServedModel(Description(CARD, "", vision_files()))
    yield model
    model.close()


def prepared(model, prompt, images=None, *, chat=False, params=None):
    options = check_options({} if images is None else {"images": images})
    draft = Draft("r", prompt, params, options, {} if chat else None)
    return draft.prepare(model).spec.context


def user(*parts):
    return [{"role": "user", "content": list(parts)}]


IMAGE, TEXT = {"type": "image"}, {"type": "text", "text": "What is it?"}


class TestChat:
    def check(self, model, wire, *images):
        placeholder = model.tokenizer.image_token_id
        assert type(wire) is WireVisionContext
        check_wire_context(wire, model.card)
        assert len(wire.images) == len(images)
        assert (wire.tokens.array == placeholder).sum() == sum(tokens for _, tokens in images)
        for image, (shape, tokens) in zip(wire.images, images, strict=True):
            assert image.pixel_values.shape == shape
            assert image.end_idx - image.start_idx == tokens
            assert image.image_hash == image_hash(image.pixel_values)
            span = wire.tokens.array[image.start_idx : image.end_idx]
            assert (span == placeholder).all()
        assert wire.extra_model_args["image_grid_thw"].tolist() == [
            [1, shape[0] // 14, shape[1] // 14] for shape, _ in images
        ]

    def test_parts_without_data_take_the_images_in_order(self, model):
        wire = prepared(model, user(IMAGE, TEXT, IMAGE), [A, B], chat=True)
        self.check(model, wire, ((56, 84, 3), A_TOKENS), ((84, 84, 3), B_TOKENS))
        text = model.tokenizer.decode(wire.tokens.array, skip_special_tokens=False)
        assert text.index("What is it?") > text.index(PAD)

    def test_parts_with_data(self, model, tmp_path):
        path = tmp_path / "b.png"
        path.write_bytes(B)
        content = user(
            {"type": "image_url", "image_url": {"url": data_url(A)}},
            {"type": "image", "image": str(path)},
            TEXT,
        )
        wire = prepared(model, content, chat=True)
        self.check(model, wire, ((56, 84, 3), A_TOKENS), ((84, 84, 3), B_TOKENS))

    def test_images_precede_the_text_of_the_last_message_without_parts(self, model):
        chat = [
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "Hi"},
            {"role": "user", "content": "What is it?"},
        ]
        wire = prepared(model, chat, [A], chat=True)
        self.check(model, wire, ((56, 84, 3), A_TOKENS))
        text = model.tokenizer.decode(wire.tokens.array, skip_special_tokens=False)
        assert text.index("Hi") < text.index(PAD) < text.index("What is it?")

    def test_equal_messages_give_equal_contexts(self, model):
        params = SamplingParams(seed=1)
        one = prepared(model, user(IMAGE, TEXT), [A], chat=True, params=params)
        opened = {"type": "image", "image": Image.open(io.BytesIO(A))}
        two = prepared(model, user(opened, TEXT), chat=True, params=params)
        assert one == two

    def test_a_chat_without_images_is_a_text_request(self, model):
        assert type(prepared(model, user(TEXT), chat=True)) is WireContext
        assert type(prepared(model, user(TEXT), [], chat=True)) is WireContext

    @pytest.mark.parametrize(
        ("content", "images", "message"),
        [
            (user(IMAGE, TEXT), [], "more parts"),
            (user(IMAGE, TEXT), None, "more parts"),
            (user(IMAGE, TEXT), [A, B], "only 1 part"),
            (user({"type": "text", "text": PAD}, IMAGE), [A], "2 placeholders for 1 images"),
            ([{"role": "assistant", "content": "x"}], [A], "message of the user"),
            (user({"type": "image_url", "image_url": {"url": "https://a/b"}}), None, "yourself"),
            (user({"type": "image", "image": "http://a/b.png"}), None, "yourself"),
            (user({"type": "image_url", "image_url": {"url": "data:a/b,xx"}}), None, "base64"),
            (user({"type": "image_url", "image_url": "data:;base64,??"}), None, "not base64"),
            (
                user({"type": "image_url", "image_url": "data:text/plain;base64,AAAA"}),
                None,
                "must have a type image/..., not 'text/plain'",
            ),
            (user({"type": "image_url", "image_url": {"url": "/etc/passwd"}}), None, "yourself"),
            (user({"type": "image", "image": b"no image"}), None, "cannot be read"),
            (user(*[IMAGE] * 70), [A] * 70, "at most 60"),
        ],
    )  # fmt: skip
    def test_what_does_not_fit_is_refused(self, model, content, images, message):
        with pytest.raises(InputError, match=message):
            prepared(model, content, images, chat=True)


class TestGenerate:
    def test_each_placeholder_becomes_the_tokens_of_its_image(self, model):
        wire = prepared(model, f"one {PAD} two {PAD} end", [A, B])
        assert [one.end_idx - one.start_idx for one in wire.images] == [A_TOKENS, B_TOKENS]
        plain = model.tokenizer.encode(f"one {PAD} two {PAD} end")
        assert len(wire.tokens.array) == len(plain) + A_TOKENS + B_TOKENS - 2

    def test_prompts_of_token_ids(self, model):
        pad = model.tokenizer.image_token_id
        wire = prepared(model, [5, pad, 6], [A])
        assert wire.tokens.array.tolist() == [5, *[pad] * A_TOKENS, 6]
        assert (wire.images[0].start_idx, wire.images[0].end_idx) == (1, 1 + A_TOKENS)

    def test_the_limits_of_the_model_count_expanded_tokens(self, model):
        with pytest.raises(InputError, match="prompt too long"):
            prepared(model, " ".join([f"x {PAD}"] * 50), [B] * 50)
        wire = prepared(model, PAD, [A], params=SamplingParams(max_new_tokens=5))
        assert wire.max_length == len(wire.tokens.array) + 5

    @pytest.mark.parametrize(
        ("prompt", "message"),
        [("no place", "0 placeholders"), (f"{PAD}{PAD}", "no token is between")],
    )
    def test_placeholders_that_do_not_fit(self, model, prompt, message):
        with pytest.raises(InputError, match=message):
            prepared(model, prompt, [A] * max(1, prompt.count(PAD)))

    def test_a_text_model_takes_no_images(self):
        card = replace(CARD, kinds=["TextContext"])
        text = ServedModel(Description(card, "", vision_files()))
        try:
            with pytest.raises(InputError, match="'seer' takes no images"):
                prepared(text, PAD, [A])
        finally:
            text.close()


class TestTiles:
    """A model that reads images in cross-attention layers: their tokens precede the prompt."""

    CARD = replace(CARD, image_positions=20)  # in blocks of 16

    @pytest.fixture(scope="class")
    def crosser(self):
        model = ServedModel(Description(self.CARD, "", vision_files(preprocessor=TILES)))
        yield model
        model.close()

    def test_placeholders_stay_and_images_precede_the_prompt(self, crosser):
        pad = crosser.tokenizer.image_token_id
        wire = prepared(crosser, [5, pad, pad, 6], [A, picture(60, 20)])
        check_wire_context(wire, self.CARD)
        row = [1 + 1, *[pad] * 31, 1 + 4, *[pad] * 31]  # 1 x 2 tiles, and 2 x 1
        assert wire.tokens.array.tolist() == [*row, 5, pad, pad, 6]
        assert [(one.start_idx, one.end_idx) for one in wire.images] == [(1, 32), (33, 64)]
        assert [one.pixel_values.shape for one in wire.images] == [(56, 84, 3), (60, 20, 3)]
        assert wire.extra_model_args["aspect_ratio_ids"].tolist() == [[2, 5]]
        assert wire.extra_model_args["aspect_ratio_mask"].tolist() == [[[1, 1, 0, 0]] * 2]

    def test_the_limits_of_the_model_count_the_images(self, crosser):
        with pytest.raises(InputError, match="prompt too long"):
            prepared(crosser, " ".join([f"x {PAD}"] * 13), [A] * 13)

    def test_settings_of_another_model_are_refused(self):
        for card, files in ((CARD, vision_files(preprocessor=TILES)), (self.CARD, vision_files())):
            other = ServedModel(Description(card, "", files))
            try:
                with pytest.raises(CheckpointError, match="another model"):
                    prepared(other, PAD, [A])
            finally:
                other.close()


class TestSeveralAnswers:
    C, D = picture(value=91), picture(84, 84, 31)  # no other test has left them in the cache

    @pytest.fixture
    def decoded(self, monkeypatch):
        """The images that were decoded; none is kept for later requests."""
        decoded, decode = [], ImageProcessor._decode

        def counted(self, content, max_side):
            decoded.append(content)
            return decode(self, content, max_side)

        monkeypatch.setattr(processor, "RECENT_BYTES", 0)
        monkeypatch.setattr(ImageProcessor, "_decode", counted)
        return decoded

    def test_an_image_is_prepared_once(self, model, decoded):
        prompts = [f"<image>{PAD}</image> a", f"b {PAD} c"]
        options = check_options({"images": [[self.C], [self.D]]})
        drafts = Whole.of_prompt(prompts, None, 3, options).drafts
        wires = [draft.prepare(model).spec.context for draft in drafts]
        assert decoded == [self.C, self.D]
        for wire, tokens in zip(wires, [A_TOKENS] * 3 + [B_TOKENS] * 3, strict=True):
            (image,) = wire.images
            assert image.end_idx - image.start_idx == tokens
        assert wires[0].images[0].pixel_values is wires[2].images[0].pixel_values

    def test_an_image_of_a_chat_is_prepared_once(self, model, decoded):
        in_part = {"type": "image_url", "image_url": {"url": data_url(self.D)}}
        chat = user(IMAGE, TEXT, in_part)
        drafts = Whole.of_chat(chat, None, 2, None, check_options({"images": [self.C]})).drafts
        several = [draft.prepare(model).spec.context for draft in drafts]
        assert sorted(decoded) == sorted([self.C, self.D])
        one = prepared(model, chat, [self.C], chat=True)
        for wire in several:
            assert np.array_equal(wire.tokens.array, one.tokens.array)
            found = [image.image_hash for image in wire.images]
            assert found == [image.image_hash for image in one.images]
        assert chat == user(IMAGE, TEXT, in_part)

    def test_each_answer_has_the_error_of_an_image(self, model, decoded):
        drafts = Whole.of_chat(user(IMAGE), None, 3, None, check_options({"images": [b"x"]})).drafts
        for draft in drafts:
            with pytest.raises(InputError, match="formats are PNG"):
                draft.prepare(model)
        assert decoded == [b"x"]
        with pytest.raises(InputError, match=r"prompts\[1\]: .*more parts"):
            Whole.of_chat([user(TEXT), user(IMAGE)], None, 2, None, {})


def test_images_of_a_list_of_prompts():
    options = check_options({"images": [[A], []]})
    assert [one["images"] for one in options_of_each(2, options)] == [[A], []]
    for wrong in ([A, B], [[A]], [[A], A]):
        with pytest.raises(InputError, match="2 lists"):
            options_of_each(2, check_options({"images": wrong}))


@pytest.mark.parametrize("wrong", [A, "path", 7, np.zeros((4, 4, 3), np.uint8), {"a": A}])
def test_images_must_be_a_list(wrong):
    with pytest.raises(InputError, match="images must be a list"):
        check_options({"images": wrong})
