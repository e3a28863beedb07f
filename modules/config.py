"""Settings of the model. Imports no torch, so that the command line starts fast."""

from dataclasses import dataclass, field, fields, replace
from math import inf
from typing import Literal

from logitmix.common.mappings import require, require_from
from logitmix.common.plugins import Kinds

from .schema import USER, Schema

WIDEST, LONGEST, MOST_NEGATIVES = 2**16, 2**16, 2**22
"""Limits of widths, histories and numbers of negatives. A number far above them is a typing error, and there would not
be enough memory for it."""


_RANGES = {
    "blocks": (1, 1024), "heads": (1, 1024), "expansion": (1, 64), "max_length": (1, LONGEST),
    "projection_hidden": (0, WIDEST),
}  # fmt: skip
"""Limits of whole numbers by name; others are widths, from 1 to WIDEST."""


class Section:
    """A part of the model's settings, whose whole numbers, rates of dropout, temperatures and weights are checked."""

    section = ""
    """Its place among all settings."""

    def __post_init__(self) -> None:
        for setting in fields(self):  # type: ignore[arg-type]
            name, value = f"{self.section}.{setting.name}", getattr(self, setting.name)
            if setting.name.endswith("dropout"):
                require(0 <= value < 1, name, value, "in [0, 1)")
            elif setting.name == "temperature":
                require(0 < value < inf, name, value, "above 0 and finite")
            elif isinstance(value, float):
                require(0 <= value < inf, name, value, "0 or more and finite")
            elif type(value) is int:
                require_from(*_RANGES.get(setting.name, (1, WIDEST)), name, value)


class _Encoder(Section):
    section = "model.encoder"

    def require_width(self, dim: int) -> None:
        """Raises ValueError where the encoder cannot have the width."""


class _Similarity(Section):
    section = "model.similarity"


@dataclass(frozen=True)
class AttentionConfig(_Encoder):
    """Settings that encoders with blocks of causal attention have in common, each of which uses all of them. A setting
    of one kind alone stands in the class of this kind, and no kind extends the class of another."""

    kind: str = ""
    """Each kind has its own settings; --model.encoder.kind KIND --help model.encoder lists them."""
    blocks: int = 2
    """b: attention blocks."""
    heads: int = 1
    """h: attention heads."""
    dropout: float = 0.2
    history_dropout: float = 0.0
    """Share of a history's items that the encoder does not see in a training step; they are still predicted."""
    max_length: int = 200
    """L: history positions that the encoder sees."""

    def require_width(self, dim: int) -> None:
        """Raises ValueError where the heads cannot share the width evenly."""
        if dim % self.heads:
            near = [h for h in range(1, dim + 1) if dim % h == 0]
            near.sort(key=lambda h: abs(h - self.heads))
            raise ValueError(
                f"model.dim ({dim}) must be divisible by model.encoder.heads ({self.heads}); "
                f"set model.encoder.heads to {near[0]} or {near[1]}"
            )


@dataclass(frozen=True)
class SASRecConfig(AttentionConfig):
    """The user side, of kind "sasrec": causal self-attention over the history; the paper's settings are in appendix
    A."""

    module = "logitmix.modules.encoders.sasrec:SASRec"
    kind: str = "sasrec"
    dropout: float = 0.2
    """Rate on the input, the attention output and the feed-forward layers."""


@dataclass(frozen=True)
class LiGRConfig(AttentionConfig):
    """The user side, of kind "ligr": SASRec with the blocks of LiGR (Borisyuk et al., 2025), whose residuals are gated,
    and with SwiGLU, as in eSASRec (2025)."""

    module = "logitmix.modules.encoders.ligr:LiGR"
    kind: str = "ligr"
    dropout: float = 0.2
    """Rate on the input, the attention output and the feed-forward layers."""
    expansion: int = 4
    """Hidden width of the feed-forward network, in widths of the model."""


@dataclass(frozen=True)
class HSTUConfig(AttentionConfig):
    """The user side, of kind "hstu": hierarchical sequential transduction units (Zhai et al., 2024), the stronger
    encoder."""

    module = "logitmix.modules.encoders.hstu:HSTU"
    kind: str = "hstu"
    blocks: int = 4
    heads: int = 2
    dropout: float = 0.2
    """Rate on the input and on each block's gated attention."""
    times: bool = False
    """Attention sees the time from each action to the request, from timestamps: in training to the next action. A
    request then states its actions' timestamps and its own time."""


@dataclass(frozen=True)
class FuXiConfig(AttentionConfig):
    """The user side, of kind "fuxi": FuXi-alpha (Ye et al., 2025): HSTU with channels of attention of their own for
    distances and, with `times`, for times, and with a gated feed-forward network."""

    module = "logitmix.modules.encoders.fuxi:FuXi"
    kind: str = "fuxi"
    blocks: int = 4
    heads: int = 2
    dropout: float = 0.2
    """Rate on the input, and in each block on the gated attention and before the second stage."""
    times: bool = False
    """Attention sees the time from each action to the request, from timestamps: in training to the next action. A
    request then states its actions' timestamps and its own time."""
    expansion: int = 1
    """Hidden width of the feed-forward network's second stage, in widths of the model."""


@dataclass(frozen=True)
class PooledConfig(_Encoder):
    """The user side, of kind "pooled": the mean of the history through an MLP, blind to its order (the paper's
    non-sequential setting)."""

    module = "logitmix.modules.encoders.pooled:Pooled"
    kind: str = "pooled"
    """Each kind has its own settings; --model.encoder.kind KIND --help model.encoder lists them."""
    hidden: int = 256
    """Hidden width of the MLP."""
    dropout: float = 0.2
    """Rate on the MLP's input and hidden layer."""
    max_length: int = 200
    """L: history positions that are pooled."""


EncoderConfig = SASRecConfig | LiGRConfig | HSTUConfig | FuXiConfig | PooledConfig
ENCODERS = Kinds(
    "encoder",
    {"sasrec": SASRecConfig, "ligr": LiGRConfig, "hstu": HSTUConfig, "fuxi": FuXiConfig, "pooled": PooledConfig},
    needs=("module", "dropout", "max_length", "require_width"),
)
"""Settings of encoders, by kind. `module`: its class, which is built from the width and the settings."""


def sees_times(config: EncoderConfig, schema: Schema) -> bool:
    """Returns whether the encoder or the items' dates need the times of a packing's positions."""
    return bool(getattr(config, "times", False) or schema.unit)


@dataclass(frozen=True)
class DotConfig(_Similarity):
    """phi(x, u), the similarity, of kind "dot": a dot product."""

    module = "logitmix.modules.similarity.dot:Dot"
    kind: str = "dot"
    """Each kind has its own settings; --model.similarity.kind KIND --help model.similarity lists them."""
    normalize: bool = True
    """L2-normalize both embeddings, which makes the product a cosine."""
    temperature: float = 0.05
    """Divides the product, normalized or not. The paper's "temperature" of 20 is its reciprocal."""


@dataclass(frozen=True)
class MLPConfig(_Similarity):
    """phi(x, u), the similarity, of kind "mlp": a multilayer perceptron of query and item (appendix A)."""

    module = "logitmix.modules.similarity.mlp:MLP"
    kind: str = "mlp"
    """Each kind has its own settings; --model.similarity.kind KIND --help model.similarity lists them."""
    hidden: int = 512
    """H: width of the hidden layer."""
    dropout: float = 0.1
    """Rate on the hidden layer."""


@dataclass(frozen=True)
class NeuMFConfig(_Similarity):
    """phi(x, u), the similarity, of kind "neumf": neural matrix factorization (appendix A)."""

    module = "logitmix.modules.similarity.neumf:NeuMF"
    kind: str = "neumf"
    """Each kind has its own settings; --model.similarity.kind KIND --help model.similarity lists them."""
    gmf_dim: int = 32
    """G: width of the product of query and item ("GMF")."""
    hidden: int = 256
    """H: hidden width of the MLP of query and item."""
    mlp_dim: int = 64
    """O: width of that MLP's output."""
    final_hidden: int = 256
    """F: hidden width of the final MLP, which takes both."""
    dropout: float = 0.1
    """Rate on the hidden layer of the MLP of query and item."""


@dataclass(frozen=True)
class DeepFMConfig(_Similarity):
    """phi(x, u), the similarity, of kind "deepfm": products of groups of query and item, and an MLP of them
    (appendix A, "FM")."""

    module = "logitmix.modules.similarity.deepfm:DeepFM"
    kind: str = "deepfm"
    """Each kind has its own settings; --model.similarity.kind KIND --help model.similarity lists them."""
    query_components: int = 8
    """U: groups of the query, MoL's k_u."""
    item_components: int = 8
    """I: groups of the item, MoL's k_x."""
    component_dim: int = 32
    """C: width of a group."""
    projection_hidden: int = 512
    """Hidden width of the two projections to groups; 0 makes them linear ("N/A" in appendix A)."""
    projection_dropout: float = 0.1
    """Rate on the input of the item's projection."""
    hidden: int = 256
    """Hidden width of the output layer, an MLP of the groups' products."""
    dropout: float = 0.2
    """Rate on its hidden layer."""


@dataclass(frozen=True)
class MoLConfig(_Similarity):
    """phi(x, u), the similarity, of kind "mol": the mixture of logits (final MoL algorithm, section 3.4)."""

    module = "logitmix.modules.similarity.mol:mixture_of_logits"
    kind: str = "mol"
    """Each kind has its own settings; --model.similarity.kind KIND --help model.similarity lists them."""
    normalize: bool = True
    """L2-normalize components ("component-level hypersphere embeddings", section 3.3)."""
    temperature: float = 0.05
    """Divides the products of components. The paper's "tau = 20" is its reciprocal."""
    query_components: int = 8
    """U: the paper's k_u (section 3.1)."""
    item_components: int = 8
    """I: the paper's k_x."""
    component_dim: int = 32
    """C: width of a component."""
    user_component: bool = False
    """With the feature "user": the last of the query's components is that of the user's id, as in the authors' later
    code; one more query component leaves the others as many. The user's embedding is then added to the encoder's output
    for the h-indexer alone, so a warm start should come from a run that does not know the user."""
    gating: Literal["decomposed", "joint"] = "decomposed"
    """Three gating MLPs, of query, item and logits (gating function decomposition, section 3.2), or one of all of them,
    to compare with: it trains far slower, in plain torch, as on CUDA more than 16 components of a side or 64 pairs."""
    gate_hidden: int = 128
    """Hidden width of the gating MLPs."""
    projection_hidden: int = 512
    """Hidden width of the two projections to components; 0 makes them linear ("N/A" in appendix A)."""
    item_projection_linear: bool = False
    """The item's projection is linear, whatever the query's is, as in the authors' later code."""
    projection_dropout: float = 0.1
    """Rate on the input of the item's projection."""
    gate_dropout: float = 0.2
    """Rate on the gating distribution, which is renormalized afterwards."""
    gate_input_dropout: float = 0.0
    """Rate on the inputs of the query's and the item's gating MLPs."""
    mutual_information: float = 0.0
    """Weight in the loss of the gates' mutual information with the pairs, which balances the use of components; the
    authors' later code has 0.001."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.user_component and self.query_components == 1:
            raise ValueError("model.similarity.user_component takes model.similarity.query_components of 2 or more")


SimilarityConfig = DotConfig | MLPConfig | NeuMFConfig | DeepFMConfig | MoLConfig
SIMILARITIES = Kinds(
    "similarity",
    {"dot": DotConfig, "mlp": MLPConfig, "neumf": NeuMFConfig, "deepfm": DeepFMConfig, "mol": MoLConfig},
    needs=("module",),
)
"""Settings of similarities, as those of encoders."""


@dataclass(frozen=True)
class HIndexerConfig(Section):
    """Stage 1: a low-dimensional dot product, co-trained with the similarity (section 4.1)."""

    section = "model.hindexer"

    dim: int = 64
    """H: its width."""
    temperature: float = 0.05
    """Divides its cosines."""
    weight: float = 0.0
    """Weight of its own sampled softmax in the loss; 0 leaves it out of training, export and retrieval."""
    detach: bool = False
    """Its loss trains only its two projections: its gradient does not reach the tables, the towers and the encoder."""


@dataclass(frozen=True)
class LossConfig:
    """The loss, a sum over positions of a function of the target's score and those of its negatives."""

    module = "logitmix.modules.losses.blockwise:softmax"
    corrects = True
    """Whether scores may be corrected by the log of sampling probabilities, as `in_batch` does."""
    kind: str = "softmax"
    """Sampled softmax (softmax), the binary cross entropy of the paper's baseline (bce, section 5.1.2), or a plugin's;
    --model.loss.kind KIND --help model.loss lists the settings."""
    negatives: int = 128
    """N: uniform negatives of a group; 0, with share batch: every item, once (full softmax)."""
    in_batch: int = 0
    """M: further negatives of a group, drawn from the targets of the whole batch, so that popular items are drawn more
    often. Each candidate's score is then corrected by the log of its sampling probability (logQ)."""
    share: Literal["position", "sequence", "group", "batch"] = "group"
    """What shares one set of negatives: a sequence, a group of consecutive sequences, or the batch. Where sequences are
    short, groups need the rows of far fewer items. With position, each position has its own set, as in SASRec, which
    takes several times as long and needs the rows of more items."""
    group_positions: int = 128
    """With share group: about how many positions a group has. It ends with the sequence that reaches a multiple of this
    in the batch."""

    resample: int = 0
    """n: so many of a group's negatives, drawn by the dot product of query and item, take the place of all in the
    similarity's loss, with weights that keep the expected sum (importance sampling). MoL then learns from those that
    matter, in the time of a few; the h-indexer's loss has all. Takes share sequence or group. 0: all."""

    def __post_init__(self) -> None:
        resampled, whole = self.resample > 0, self.negatives == 0
        require_from(0, MOST_NEGATIVES, "model.loss.negatives", self.negatives)
        require_from(0, MOST_NEGATIVES, "model.loss.in_batch", self.in_batch)
        require(self.group_positions >= 1, "model.loss.group_positions", self.group_positions, "at least 1")
        if whole and (self.share != "batch" or self.in_batch):
            raise ValueError(
                "model.loss.negatives 0, every item, takes model.loss.share batch and model.loss.in_batch 0"
            )
        if resampled and (self.share not in ("sequence", "group") or not self.corrects):
            raise ValueError("model.loss.resample takes model.loss.kind softmax and model.loss.share sequence or group")
        require_from(0, self.negatives + self.in_batch - resampled, "model.loss.resample", self.resample)
        if self.in_batch and not self.corrects:
            raise ValueError(
                f"model.loss.in_batch takes model.loss.kind softmax, whose scores are corrected, not {self.kind}"
            )

    def candidates(self, num_items: int) -> int:
        """Returns N + M, in a corpus of so many items."""
        return (self.negatives or num_items) + self.in_batch


@dataclass(frozen=True)
class BCEConfig(LossConfig):
    """The loss, of kind "bce": the paper's binary cross entropy (section 5.1.2)."""

    module = "logitmix.modules.losses.blockwise:bce"
    corrects = False
    kind: str = "bce"


LOSSES = Kinds("loss", {"softmax": LossConfig, "bce": BCEConfig}, needs=("module", *LossConfig.__annotations__))
"""Settings of losses. `module`: a function of positive_T, negative_TN, hit_TN (true where a negative is the target) and
the settings, which returns the sum of the losses of T positions."""


@dataclass(frozen=True)
class ModelConfig(Section):
    """The model's width and the features that it uses."""

    section = "model"

    dim: int = 64
    """D: width of the item embedding and of the encoder."""
    features: tuple[str, ...] = ()
    """Names of the dataset's features that the model uses besides the item ids; "all" for all that have a column.
    "recency", the time since the user's previous action, and "user", the user's id, work with every dataset; "all" does
    not include them."""
    item_id_dropout: float = 0.0
    """Share of items whose row is replaced by the unknown item's row for a training step, so that the model learns to
    work from features alone. With features of items, those whose actions are all held out are then no negatives."""
    user_id_dropout: float = 0.5
    """With the feature "user": share of sequences whose user's row is replaced by the unknown user's for a training
    step, so that the model learns to work without knowing the user."""
    wanted: str = ""
    """An id of the actions, such as their kind, whose value of the action that is to come the query knows: in training
    and evaluation that of the target, in requests their entry "want"."""
    wanted_dropout: float = 0.2
    """With `wanted`: share of the positions that do not know it in a training step, as requests without "want"."""
    encoder: EncoderConfig = field(default_factory=SASRecConfig)
    similarity: SimilarityConfig = field(default_factory=DotConfig)
    hindexer: HIndexerConfig = field(default_factory=HIndexerConfig)
    loss: LossConfig = field(default_factory=LossConfig)

    def __post_init__(self) -> None:
        if self.dim < 4 or self.dim % 4:
            below = max(4, self.dim // 4 * 4)
            raise ValueError(
                f"model.dim ({self.dim}) must be divisible by 4, as FBGEMM's embedding rows are; "
                f"set model.dim to {below} or {below + 4}"
            )
        super().__post_init__()
        self.encoder.require_width(self.dim)


def without_user_component(config: ModelConfig) -> ModelConfig:
    """Returns the model as it is, or without the user's id where it is one of the query's components."""
    if not isinstance(config.similarity, MoLConfig) or not config.similarity.user_component:
        return config
    similarity = replace(config.similarity, user_component=False)
    return replace(config, similarity=similarity, features=tuple(name for name in config.features if name != USER))


def plugins_of(config: ModelConfig, schema: Schema) -> dict[str, str]:
    """Names and versions of the plugins that the kinds of the model and of its features come from."""
    kinds = {"encoder": ENCODERS, "similarity": SIMILARITIES, "loss": LOSSES}
    used = [of.plugins.get(getattr(config, section).kind) for section, of in kinds.items()]
    return {plugin.name: plugin.version for plugin in used if plugin} | schema.plugins()


def has_user_component(config: ModelConfig) -> bool:
    """Returns whether the user's id is one of the query's components."""
    return isinstance(config.similarity, MoLConfig) and config.similarity.user_component


ENCODERS.offer(ModelConfig, "encoder")
SIMILARITIES.offer(ModelConfig, "similarity")
LOSSES.offer(ModelConfig, "loss")
