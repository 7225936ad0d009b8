"""Models of which a program's layer is a whole block."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from shardlab.errors import UserError
from shardlab.models.model import Model
from shardlab.models.primitive import Primitive, Step
from shardlab.models.primitives import Add, DropoutSite, Embed, Lookup, Norm, Scores
from shardlab.models.run import Run, runs
from shardlab.program.sizes import Sizes


@dataclass(frozen=True, kw_only=True)
class Blocks(Model):
    """A model with one block in each layer.

    The embedding belongs to layer 0, the final norm and the head to layer `layers - 1`.
    """

    @abstractmethod
    def block_parts(self) -> Sequence[tuple[str, Sequence[Primitive]]]:
        """What every block computes: each part's name for a reader, and its primitives."""

    @property
    def positions(self) -> bool:
        """Whether positions are learned."""
        return False

    @property
    def rms(self) -> bool:
        """Whether norms are RMSNorms."""
        return False

    @property
    def epsilon(self) -> float:
        """What norms add to the variance, or to the mean square."""
        return 1e-5

    @property
    def has_tied_head(self) -> bool:
        """Whether the head computes with the token embedding."""
        return False

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """All primitives, in order."""
        first, last, drops = 0, self.layers - 1, self.dropout > 0
        tokens, hidden_size = self.seq_len, self.hidden_size
        lookup = Lookup(tokens=tokens, hidden_size=hidden_size, vocab_size=self.vocab_size)
        embed = Embed(tokens=tokens, hidden_size=hidden_size, positions=self.positions, drops=drops)
        found = [Step(lookup, first, "embedding"), Step(embed, first, "embedding")]
        parts = self.block_parts()
        for block in range(self.layers):
            found += [Step(each, block, f"block {block}, {name}") for name, part in parts for each in part]
        scores = Scores(
            tokens=tokens, name="lm_head", outputs=self.vocab_size, inputs=hidden_size, bias=False,
            out_index="vocab", in_index="width", tied=self.has_tied_head,
        )  # fmt: skip
        return (*found, Step(self.norm_of("ln_f"), last, "head"), Step(scores, last, "head"))

    def norm_of(self, name: str) -> Norm:
        """A norm of the residual stream."""
        return Norm(
            tokens=self.seq_len, name=name, hidden_size=self.hidden_size, rms=self.rms, bias=self.bias, eps=self.epsilon
        )

    def add(self, site: DropoutSite, bias: str = "") -> Add:
        """A sum of a branch with the residual stream; `bias` names that of the linear map before it."""
        drops, bias = self.dropout > 0, bias if self.bias else ""
        return Add(tokens=self.seq_len, hidden_size=self.hidden_size, bias=bias, drops=drops, site=site)

    @cached_property
    def runs(self) -> Sequence[Run]:
        blocks = [step.block for step in self.steps]
        return runs(self.steps, [blocks.index(block) for block in range(1, self.layers)])

    def place(self, layer: int) -> str:
        return f"block {layer}"

    def borrowed(self, layer: int) -> tuple[str, ...]:
        """Name what a layer borrows, as `Model.borrowed` does, without making all layers: there may be more than memory
        holds."""
        return ("wte.weight",) if self.has_tied_head and 0 < layer == self.layers - 1 else ()

    def sizes(self, rows: int, element_bytes: int) -> Sizes:
        """Sizes for programs of whole blocks, as `Model.sizes` gives them.

        Raises:
            UserError: when the last block computes with a weight of the first one, as no program of whole blocks can.
        """
        if self.borrowed(self.layers - 1):
            raise UserError(
                f"tied embeddings are one parameter of two layers, but whole blocks share none: of {self.layers}, the "
                "first holds the embedding and the last the head; run it by a plan, such as zero-3 or --pp 2, or by a "
                "program whose ranks have all layers, such as fsdp, set layers to 1, or leave the embeddings untied"
            )
        return super().sizes(rows, element_bytes)
