"""Images and videos in the rows: which tokens are whose, which are the same picture, and those a packed row needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...engine.errors import BadOptionError, UnsupportedError
from ...models.spec import describe

#: (pixels, grid, config attribute of the placeholder token)
KINDS = (
    ("pixel_values", "image_grid_thw", "image_token_id"),
    ("pixel_values_videos", "video_grid_thw", "video_token_id"),
)
#: what else can carry media into a call, and cannot be taken apart here
_UNKNOWN = ("mm_encoder_outputs", "image_embeds", "image_features", "input_features", "image_position_ids", "image_sizes")


@dataclass(frozen=True, eq=False)
class Media:
    """The images (or videos) of a batch, in order.

    Attributes:
        pixels_name, grid_name: the call's keyword arguments.
        pixels: [patches, ...], grid: [items, 3].
        patches: how many of them each item has.
        owner: int64 [B, S], the item that a cell is a placeholder of, -1 elsewhere.
        alike: per item, the number of the first item that is the same picture.
        spans: per item, (row, first column, last column).
    """

    pixels_name: str
    grid_name: str
    pixels: Tensor
    grid: Tensor
    patches: list[int]
    owner: Tensor
    alike: list[int]
    spans: list[tuple[int, int, int]]

    def keys(self) -> Tensor:
        """int64 [B, S]: 0 without a picture, else a number that is equal for the same picture."""
        alike = torch.tensor([-1, *self.alike], device=self.owner.device)
        return alike[self.owner + 1] + 1

    def chosen(self, cells: Tensor) -> dict[str, Tensor]:
        """The call's arguments for the placeholders at these cells, in their order."""
        owners = self.owner.flatten()[cells]
        order = list(dict.fromkeys(owners[owners >= 0].tolist()))
        starts = [0]
        for n in self.patches:
            starts.append(starts[-1] + n)
        rows = [torch.arange(starts[item], starts[item + 1]) for item in order]
        index = torch.cat([torch.empty(0, dtype=torch.int64), *rows])
        grid_index = torch.tensor(order, dtype=torch.int64)
        return {
            self.pixels_name: self.pixels.index_select(0, index.to(self.pixels.device)),
            self.grid_name: self.grid.index_select(0, grid_index.to(self.grid.device)),
        }


def find_media(model: nn.Module, kwargs: dict[str, Any], real: Tensor) -> list[Media]:
    """The media of a call.

    Args:
        real: bool [B, S].

    Raises:
        UnsupportedError: media that cannot be matched with tokens here; names the argument.
        BadOptionError: placeholders and patches that do not match.
    """
    for name in _UNKNOWN:
        if kwargs.get(name) is not None:
            raise UnsupportedError(
                f"prefix_grouper: {describe(model)} was called with {name}, which cannot be divided among packed rows; only "
                f"pixel_values with image_grid_thw (and their video forms) are supported"
            )
    found = []
    for pixels_name, grid_name, token_name in KINDS:
        pixels, grid = kwargs.get(pixels_name), kwargs.get(grid_name)
        if pixels is None:
            continue
        config: Any = getattr(model, "config", None)
        token, tokens = getattr(config, token_name, None), _token_counts(getattr(config, "vision_config", None), grid)
        if grid is None or token is None or tokens is None:
            raise UnsupportedError(
                f"prefix_grouper: {pixels_name} of {describe(model)} cannot be matched with tokens: looked for {grid_name} in "
                f"the call, for {token_name} and for vision_config.spatial_merge_size or merge_kernel_size in the config"
            )
        sizes: list[int] = grid.prod(-1).tolist()
        if sum(sizes) != pixels.shape[0]:
            raise BadOptionError(
                f"prefix_grouper: {pixels_name} has {pixels.shape[0]} patches, and {grid_name} says {sum(sizes)}"
            )
        owner, spans = _owners(kwargs["input_ids"], real, token, tokens, pixels_name)
        found.append(Media(pixels_name, grid_name, pixels, grid, sizes, owner, _alike(pixels, grid, sizes), spans))
    return found


def _token_counts(vision: Any, grid: Tensor | None) -> list[int] | None:
    """How many tokens each item has, or None where the config does not say."""
    side, kernel = getattr(vision, "spatial_merge_size", None), getattr(vision, "merge_kernel_size", None)
    counts: list[int] | None = None
    if grid is not None and isinstance(side, int):
        counts = (grid.prod(-1) // side**2).tolist()
    elif grid is not None and isinstance(kernel, (tuple, list)):  # frames are pooled into one
        counts = (grid[:, 1] // kernel[0] * (grid[:, 2] // kernel[1])).tolist()
    return counts


def cut_at_media(shared: int, media: list[Media], row: int, real: Tensor) -> int:
    """Shorten a shared prefix of `shared` real tokens of a row so that it ends before or after a picture, never within."""
    for one in media:
        for of_row, first, last in one.spans:
            if of_row == row:
                before, within = int(real[row, :first].sum()), int(real[row, first : last + 1].sum())
                if before < shared < before + within:
                    shared = before
    return shared


def _owners(
    input_ids: Tensor, real: Tensor, token: int, tokens: list[int], name: str
) -> tuple[Tensor, list[tuple[int, int, int]]]:
    places = ((input_ids == token) & real).flatten().nonzero()[:, 0]
    if len(places) != sum(tokens):
        raise BadOptionError(
            f"prefix_grouper: input_ids have {len(places)} placeholder tokens ({token}) for {name}, which makes {sum(tokens)}"
        )
    owner = torch.full((input_ids.numel(),), -1, dtype=torch.int64, device=input_ids.device)
    items = torch.repeat_interleave(torch.arange(len(tokens)), torch.tensor(tokens, dtype=torch.int64))
    owner[places] = items.to(owner.device)
    ends, cells, width = 0, places.tolist(), input_ids.shape[1]
    spans = []
    for n in tokens:
        first, last = cells[ends], cells[ends + n - 1]
        if first // width != last // width:
            raise BadOptionError(f"prefix_grouper: the placeholders of one item of {name} are spread over two rows")
        spans.append((first // width, first % width, last % width))
        ends += n
    return owner.view(input_ids.shape), spans


def _alike(pixels: Tensor, grid: Tensor, sizes: list[int]) -> list[int]:
    """Number the pictures so that equal ones (to the bit) have the number of the first of them."""
    known: dict[tuple[Any, ...], list[int]] = {}
    pieces = torch.split(pixels.detach(), sizes)
    shapes = grid.tolist()
    # Sums tell most pictures apart in one transfer; what is left is compared in full.
    sums = torch.stack([piece.double().sum() for piece in pieces]).tolist() if pieces else []
    found = []
    for item, (piece, shape) in enumerate(zip(pieces, shapes, strict=True)):
        candidates = known.setdefault((*shape, sums[item]), [])
        same = next((other for other in candidates if torch.equal(pieces[other], piece)), item)
        if same == item:
            candidates.append(item)
        found.append(same)
    return found
