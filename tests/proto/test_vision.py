import copy
import pickle

import numpy as np
import pytest

from baton.proto import ImageMetadata, InputError, TextAndVisionContext, TokenBuffer
from baton.proto.contexts.images import image_key
from baton.proto.hashing import block_hashes
from baton.proto.wire.context_maps import context_to_run, request_map

V = 98  # id of image tokens


def image(start, end, fill=1.0, **fields):
    pixels = np.full((2, 2), fill, np.float32)
    return ImageMetadata(start_idx=start, end_idx=end, pixel_values=pixels, **fields)


def prompt(*spans, length=24):
    tokens = np.arange(length)
    for start, end in spans:
        tokens[start:end] = V
    return tokens


def context(*spans, length=24, **fields):
    fields.setdefault("images", [image(*span) for span in spans])
    return TextAndVisionContext(
        max_length=100, tokens=prompt(*spans, length=length), vision_token_ids=[V], **fields
    )


class TestMetadata:
    @pytest.mark.parametrize(("start", "end"), [(-1, 3), (3, 3), (4, 3)])
    def test_bad_ranges(self, start, end):
        with pytest.raises(ValueError, match="image"):
            image(start, end)

    def test_repr_names_the_range_first_and_only_the_shape_of_the_pixels(self):
        assert repr(image(5, 9)) == (
            "ImageMetadata(start_idx=5, end_idx=9, pixel_values=<float32 (2, 2)>)"
        )

    def test_keyword_only_and_equal_by_value(self):
        with pytest.raises(TypeError):
            ImageMetadata(1, 2, np.zeros(1))
        assert image(1, 2) == image(1, 2)
        assert image(1, 2) != image(1, 3)
        assert image(1, 2) != image(1, 2, fill=2.0)
        assert image(1, 2) != image(1, 2, image_hash=5)
        assert image(1, 2) != "image"

    def test_key_depends_on_type_shape_and_content_or_on_the_hash_alone(self):
        pixels = np.arange(4, dtype=np.float32)
        others = [pixels.reshape(2, 2), pixels.view(np.int32), pixels + 1]
        assert len({image_key(pixels)} | {image_key(other) for other in others}) == 4
        assert image_key(pixels, 5) == image_key(pixels + 1, 5) != image_key(pixels, 6)
        assert image_key(pixels[:0]) == image_key(pixels[:0])
        assert image_key(np.asfortranarray(pixels.reshape(2, 2))) == image_key(pixels.reshape(2, 2))


class TestConstruction:
    def test_refusals(self):
        for spans, message in [
            ([(15, 19), (5, 9)], "Images must be sorted"),
            ([(5, 9), (8, 12)], "Images must be non-overlapping"),
            ([(5, 9), (9, 12)], "Images must be non-overlapping"),
            ([(20, 25)], "Images must be before the end of the token array"),
        ]:
            images = [image(*span) for span in spans]
            with pytest.raises(InputError, match=message):
                context((0, 24), images=images)

    @pytest.mark.parametrize("at", [5, 8])
    def test_both_ends_must_be_vision_tokens(self, at):
        tokens = prompt((5, 9))
        tokens[at] = 1
        with pytest.raises(InputError, match=r"Images must be filled with <vision_token_id> \("):
            TextAndVisionContext(
                max_length=50, tokens=tokens, vision_token_ids=[V, 97], images=[image(5, 9)]
            )
        tokens[at] = 97
        TextAndVisionContext(
            max_length=50, tokens=tokens, vision_token_ids=[V, 97], images=[image(5, 9)]
        )

    @pytest.mark.parametrize(("position", "fine"), [(5, 1), (6, 0), (8, 0), (9, 1)])
    def test_the_first_step_may_not_cut_an_image(self, position, fine):
        tokens = TokenBuffer(prompt((5, 9)))
        tokens.chunk(position)

        def make():
            return TextAndVisionContext(
                max_length=50, tokens=tokens, vision_token_ids=[V], images=[image(5, 9)]
            )

        if fine:
            assert make().tokens is tokens
            return
        message = rf"current_position \({position}\) to bisect an image \(ImageMetadata\(start"
        with pytest.raises(InputError, match=message):
            make()

    def test_is_a_text_context_with_its_own_value(self):
        one, two = (context((5, 9), request_id="r") for _ in range(2))
        two.sampling_params = one.sampling_params
        assert one == two
        assert not hasattr(one, "__dict__")
        two.images[0].pixel_values[0, 0] = 7
        assert one != two
        assert pickle.loads(pickle.dumps(one)) == copy.deepcopy(one) == one
        two = copy.deepcopy(one)
        two.extra_model_args["x"] = np.zeros(1)
        assert one != two


class TestEncoding:
    def test_what_waits_follows_from_the_processed_tokens(self):
        ctx = context((5, 9), (15, 19))
        seen = []
        for skip in (0, 8, 1, 9, 1):
            ctx.tokens.skip_processing(skip)
            seen.append((ctx.image_idx, ctx.needs_vision_encoding, len(ctx.next_images)))
        assert seen == [(0, True, 2), (0, True, 2), (1, True, 1), (1, True, 1), (2, False, 0)]
        ctx.reset()
        assert (ctx.image_idx, ctx.needs_vision_encoding) == (0, True)

    def test_aligned_index(self):
        ctx = context((5, 9))
        assert [ctx.compute_image_aligned_idx(i) for i in (4, 5, 6, 8, 9)] == [4, 5, 5, 5, 9]

    @pytest.mark.parametrize(
        ("skip", "n", "active"),
        [(0, 4, 4), (0, 5, 5), (0, 6, 5), (0, 8, 5), (0, 9, 9), (5, 1, 4), (5, 3, 4), (5, 10, 10),
         (5, 11, 10), (0, 24, 24), (0, 99, 24), (20, 2, 2)],
    )  # fmt: skip
    def test_chunks_end_at_images(self, skip, n, active):
        ctx = context((5, 9), (15, 19))
        ctx.tokens.skip_processing(skip)
        assert ctx.chunk_at_image(n) == ctx.tokens.active_length == active
        assert ctx.tokens.is_chunked == (skip + active < 24)

    def test_whole_prompt_in_chunks_at_images(self):
        ctx = context((0, 7), (8, 13), (20, 24))
        steps = []
        while True:
            steps.append(ctx.chunk_at_image(3))
            if not ctx.tokens.is_chunked:
                break
            ctx.update(0)
        assert sum(steps) == 24
        assert steps == [7, 1, 5, 3, 3, 1, 4]
        with pytest.raises(ValueError, match="at least one"):
            ctx.chunk_at_image(0)

    def test_a_step_that_would_begin_inside_an_image_is_refused_and_nothing_moves(self):
        ctx = context((5, 9))
        ctx.tokens.chunk(7)
        for step in (ctx.update, ctx.jump_ahead):
            with pytest.raises(InputError, match=r"current_position \(7\) to bisect"):
                step(1)
        assert ctx.tokens.is_chunked
        assert ctx.tokens.processed_length == 0

    def test_moved_indices_may_not_cut_an_image(self):
        ctx = context((5, 9))
        for change in ({"start_idx": 6}, {"active_idx": 8}):
            with pytest.raises(InputError, match="bisect"):
                ctx.set_token_indices(**change)
            assert (ctx.start_idx, ctx.active_idx) == (0, 24)
        with pytest.raises(InputError, match="bisect"):
            ctx.bump_token_indices(start_idx=7)
        ctx.set_token_indices(start_idx=5, active_idx=9)
        assert ctx.needs_vision_encoding

    def test_rollback_to_an_image_sees_it_whole_again(self):
        ctx = context((20, 24))
        ctx.update(1)
        ctx.rollback(1)
        assert ctx.tokens.active.tolist() == [V] * 4
        assert ctx.needs_vision_encoding


class TestPixelsWithoutTokens:
    def context(self, *pixels):
        return TextAndVisionContext(max_length=50, tokens=[1, 2, 3, 4], pixel_values=pixels)

    def test_only_one(self):
        with pytest.raises(InputError, match="only one image"):
            self.context(np.zeros(1), np.zeros(1))
        assert not self.context().needs_vision_encoding

    def test_they_wait_until_the_first_step_and_again_after_a_reset(self):
        ctx = self.context(np.zeros(1))
        assert ctx.needs_vision_encoding
        ctx.tokens.chunk(2)
        ctx.update(0)
        assert not ctx.needs_vision_encoding
        ctx.reset()
        assert ctx.needs_vision_encoding
        ctx.jump_ahead(5)
        assert not ctx.needs_vision_encoding

    def test_the_flag_can_be_set(self):
        ctx = self.context(np.zeros(1))
        ctx.needs_vision_encoding = False
        assert not ctx.needs_vision_encoding
        ctx.needs_vision_encoding = True
        assert ctx.needs_vision_encoding


class TestPrefixKeys:
    def test_without_images_they_are_the_hashes_of_the_tokens(self):
        ctx = context()
        assert ctx.prefix_keys(4, b"salt") == block_hashes(ctx.tokens.all, 4, b"salt")

    def test_an_image_changes_its_blocks_and_all_behind(self):
        one, two = context((5, 9)), context((5, 9), images=[image(5, 9, fill=2.0)])
        equal = [
            a == b for a, b in zip(one.prefix_keys(4, b""), two.prefix_keys(4, b""), strict=True)
        ]
        assert equal == [True] + [False] * 5
        assert one.prefix_keys(4, b"") == context((5, 9)).prefix_keys(4, b"")
        assert not set(one.prefix_keys(4, b"")) & set(one.prefix_keys(4, b"other"))

    def test_so_does_a_second_one(self):
        spans = ((5, 9), (15, 19))
        one = context(*spans)
        two = context(*spans, images=[image(5, 9), image(15, 19, fill=2.0)])
        pairs = zip(one.prefix_keys(4, b""), two.prefix_keys(4, b""), strict=True)
        assert [a == b for a, b in pairs] == [True] * 3 + [False] * 3

    def test_every_block_with_tokens_of_an_image_takes_its_key(self):
        """Also the second block of an image, here after blocks with equal hashes."""
        spans = [[(5 - 8, 9 - 8, bytes([k]) * 16)] for k in (1, 2)]
        tokens = prompt((5, 9))
        one, two = (block_hashes(tokens[8:], 4, b"", b"p" * 16, images=s) for s in spans)
        assert one[0] != two[0]

    def test_where_the_image_lies_counts(self):
        tokens = np.full(8, V)
        keys = [
            block_hashes(tokens, 8, b"", images=[(start, start + 3, b"k" * 16)])[0]
            for start in range(5)
        ]
        assert len(set(keys)) == 5

    def test_a_hash_stands_for_the_pixels(self):
        one = context((5, 9), images=[image(5, 9, fill=1.0, image_hash=77)])
        two = context((5, 9), images=[image(5, 9, fill=2.0, image_hash=77)])
        assert one.prefix_keys(4, b"") == two.prefix_keys(4, b"")

    def test_a_chain_can_be_continued(self):
        ctx = context((5, 9), (15, 19))
        head = block_hashes(ctx.tokens.all[:8], 8, b"", images=ctx.image_spans())
        tail = block_hashes(ctx.tokens.all[8:], 8, b"", head[-1], images=ctx.image_spans(8))
        assert head + tail == ctx.prefix_keys(8, b"")

    def test_pixels_without_tokens_count_from_the_first_block(self):
        keys = [
            TextAndVisionContext(
                max_length=50, tokens=[1, 2, 3, 4], pixel_values=(np.full(2, fill),)
            ).prefix_keys(2, b"")
            for fill in (1.0, 2.0)
        ]
        assert not set(keys[0]) & set(keys[1])


def test_wire_form_of_the_request():
    ctx = context((5, 9), (15, 19), extra_model_args={"grid": np.arange(3)}, request_id="r")
    wire = request_map(ctx)
    assert wire.__struct_config__.tag == "TextAndVisionContext"
    assert context_to_run(wire, "r") == ctx
    again = context_to_run(wire, "r", emitted=[3, 4])
    assert (again.prompt_length, again.image_idx, len(again.tokens)) == (24, 0, 26)
