"""Where a program can be mutated: its optimizer steps, backward passes, losses, batches and parts, found in its AST."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

EVALUATION = frozenset({
    "ending", "evaluate", "test", "validate", "accuracy", "distance", "estimate_loss", "perplexity", "eval_split",
    "predict", "score", "sample", "generate", "nearest_accuracy", "energy_distance", "print",
})  # fmt: skip
"""Functions that a mutation leaves alone: they evaluate or report."""

OPTIMIZERS = frozenset({"Adam", "AdamW", "SGD", "RMSprop", "Adagrad", "LBFGS"})
LOSSES = re.compile(
    r"^(self\.)?(criterion|loss_fn|loss_fct|ce_loss|loss_function)$|"
    r"(mse_loss|cross_entropy|nll_loss|smooth_l1_loss)$"
)
DRAWS = re.compile(
    r"^(get_batch|make_pairs|gen_data|dataloader|data\.batch|rb\.sample|replay_buffer\.sample|train_tasks\.sample|"
    r"batch_loader\.next)$"
)
LOADERS = re.compile(r"^(self\.)?(train_|batch_|data_)?(data)?loader$|^DataLoader\(|^batches\(")
PLACED = re.compile(r"^(images|new_images)\[")
LOSS_NAMES = re.compile(r"loss|cost", re.IGNORECASE)
ACTIVATIONS = frozenset({"ReLU", "Tanh", "GELU", "LeakyReLU", "SiLU", "NewGELU", "relu", "tanh", "gelu", "leaky_relu"})
NORMS = frozenset({"BatchNorm1d", "BatchNorm2d", "LayerNorm", "PixelNorm"})


@dataclass(frozen=True)
class Site:
    """A node of a program, and the nodes around it, the outermost first."""

    node: ast.AST
    around: tuple[ast.AST, ...]

    @property
    def text(self) -> str:
        return ast.unparse(self.node)

    def inside(self, *kinds: type[ast.AST]) -> bool:
        return any(isinstance(one, kinds) for one in self.around)

    @property
    def functions(self) -> list[str]:
        return [one.name for one in self.around if isinstance(one, ast.FunctionDef)]


Finder = Callable[[ast.Module], list[Site]]


def name_of(node: ast.AST) -> str:
    """The last part of a dotted name."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def everywhere(tree: ast.Module) -> Iterator[Site]:
    """Every node that is no part of an evaluation."""

    def walk(node: ast.AST, around: tuple[ast.AST, ...]) -> Iterator[Site]:
        if isinstance(node, ast.FunctionDef) and node.name in EVALUATION:
            return
        if isinstance(node, ast.Call) and name_of(node.func) in EVALUATION and not _draws(node):
            return
        if isinstance(node, ast.With) and any("no_grad" in ast.unparse(item) for item in node.items):
            return
        yield Site(node, around)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, (*around, node))

    yield from walk(tree, ())


def _draws(node: ast.Call) -> bool:
    return bool(DRAWS.search(ast.unparse(node.func)))


def calls(tree: ast.Module) -> Iterator[tuple[Site, ast.Call]]:
    for site in everywhere(tree):
        if isinstance(site.node, ast.Call):
            yield site, site.node


def statements(tree: ast.Module, attribute: str) -> list[Site]:
    """Statements that are a call of a method of this name."""
    return [
        site
        for site in everywhere(tree)
        if isinstance(site.node, ast.Expr)
        and isinstance(site.node.value, ast.Call)
        and isinstance(site.node.value.func, ast.Attribute)
        and site.node.value.func.attr == attribute
    ]


def optimizer_steps(tree: ast.Module) -> list[Site]:
    """Calls such as `optimizer.step()`; not of schedulers, scalers or environments."""
    return [
        site
        for site, call in calls(tree)
        if isinstance(call.func, ast.Attribute)
        and call.func.attr == "step"
        and "opt" in (text := ast.unparse(call.func.value)).lower()
        and "sched" not in text.lower()
        and "scaler" not in text.lower()
    ]


def scaler_steps(tree: ast.Module) -> list[Site]:
    return [s for s, call in calls(tree) if ast.unparse(call.func).endswith("scaler.step") and len(call.args) == 1]


def optimizers(tree: ast.Module) -> list[Site]:
    """Constructions of optimizers."""
    return [site for site, call in calls(tree) if name_of(call.func) in OPTIMIZERS]


def backwards(tree: ast.Module) -> list[Site]:
    return [
        site
        for site, call in calls(tree)
        if isinstance(call.func, ast.Attribute) and call.func.attr == "backward" and not call.args
    ]


def zero_grads(tree: ast.Module) -> list[Site]:
    return statements(tree, "zero_grad")


def scheduler_steps(tree: ast.Module) -> list[Site]:
    return [s for s in statements(tree, "step") if "sched" in s.text.lower() and "self.scheduler" not in s.text]


def train_modes(tree: ast.Module) -> list[Site]:
    """Where a model is put into training mode; `self.train()` may be anything."""
    return [s for s in statements(tree, "train") if s.text.endswith(".train()") and s.text != "self.train()"]


def losses(tree: ast.Module) -> list[Site]:
    """Calls of a loss function with predictions and targets."""
    return [s for s, call in calls(tree) if LOSSES.search(ast.unparse(call.func)) and len(call.args) >= 2]


def class_losses(tree: ast.Module) -> list[Site]:
    """Those of classes: over logits or log-probabilities."""
    text = ast.unparse(tree)
    mixed = "mse_loss" in text or "MSELoss" in text
    return [
        s
        for s in losses(tree)
        if re.search(r"cross_entropy|nll_loss", s.text) or (not mixed and re.search("CrossEntropy|NLLLoss", text))
    ]


def loss_terms(tree: ast.Module) -> list[Site]:
    """The terms of sums that are a loss: `loss = a + b`, or returned by a loss function."""
    found = []
    for site in everywhere(tree):
        node = site.node
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and site.around:
            where = site.around[-1]
            named = isinstance(where, ast.Assign) and LOSS_NAMES.search(ast.unparse(where.targets[0]))
            returned = isinstance(where, ast.Return) and any(LOSS_NAMES.search(name) for name in site.functions)
            if named or returned:
                found += [Site(side, (*site.around, node)) for side in (node.left, node.right)]
    return [s for s in found if not isinstance(s.node, ast.Constant)]


def parts(tree: ast.Module) -> list[Site]:
    """Calls of submodules in a forward pass, but for the cheap ones."""
    return [
        site
        for site, call in calls(tree)
        if "forward" in site.functions
        and re.fullmatch(r"self\.\w+", ast.unparse(call.func))
        and not re.search(r"drop|act|relu|norm|ln_", ast.unparse(call.func), re.IGNORECASE)
    ]


def batches(tree: ast.Module) -> list[Site]:
    """Where a batch is drawn in a training loop: iterated loaders, calls that draw, rows of the images."""
    found = []
    for site in everywhere(tree):
        node = site.node
        if not isinstance(node, ast.Call | ast.Subscript | ast.Name | ast.Attribute):
            continue
        text = site.text
        looped = site.inside(ast.For, ast.While) or any("train" in name for name in site.functions)
        iterated = any(isinstance(one, ast.For) and node in ast.walk(one.iter) for one in site.around)
        called = isinstance(node, ast.Call) and (_draws(node) or re.fullmatch(r"next\((data|loader)\w*\)", text))
        placed = isinstance(node, ast.Subscript) and PLACED.search(text) and "rand" in text + _rows_are(site)
        if (iterated and LOADERS.search(text)) or (looped and (called or placed)):
            found.append(site)
    return [s for s in found if not any(s.node is not o.node and s.node in ast.walk(o.node) for o in found)]


def _rows_are(site: Site) -> str:
    """How rows that are only named were drawn."""
    functions = [one for one in site.around if isinstance(one, ast.FunctionDef | ast.Module)]
    return next((t for t in map(ast.unparse, ast.walk(functions[-1])) if t.startswith("rows = ")), "")


def draws(tree: ast.Module) -> list[Site]:
    """Where a batch or the rows of a batch are drawn, so that inputs and targets stay together."""
    rows = [
        site
        for site, call in calls(tree)
        if site.inside(ast.For, ast.While)
        and re.match(r"torch\.(randint\(len|randint\(800|randperm\(len)", ast.unparse(call))
    ]
    return [s for s in batches(tree) if not isinstance(s.node, ast.Subscript)] + rows


def layers(tree: ast.Module, names: frozenset[str]) -> list[Site]:
    """Constructions of layers and calls of their functions; not of a module's own layer of that name."""
    return [
        site
        for site, call in calls(tree)
        if name_of(call.func) in names and not re.fullmatch(r"self\.\w+", ast.unparse(call.func))
    ]


def activations(tree: ast.Module) -> list[Site]:
    return layers(tree, ACTIVATIONS)


def norms(tree: ast.Module) -> list[Site]:
    return layers(tree, NORMS)


def dropouts(tree: ast.Module) -> list[Site]:
    return layers(tree, frozenset({"Dropout", "dropout"}))


def divisions(tree: ast.Module) -> list[Site]:
    """A loss divided by the number of micro-batches."""
    return [
        site
        for site in everywhere(tree)
        if isinstance(site.node, ast.BinOp)
        and isinstance(site.node.op, ast.Div)
        and re.search("loss", ast.unparse(site.node.left))
        and re.search("accumulation|meta_batch", ast.unparse(site.node.right))
    ]


def averages(tree: ast.Module) -> list[Site]:
    """Statements that bring an averaged copy or a target network up to date, in a loop."""
    pattern = re.compile(
        r"^(update_ema|accumulate\((?!.*, 0\))|model_ema\.update|learner\.update_moving_average)|"
        r"^target\w*\.load_state_dict"
    )
    return [
        site
        for site in everywhere(tree)
        if isinstance(site.node, ast.Expr) and site.inside(ast.For, ast.While) and pattern.search(site.text)
    ]


def clips(tree: ast.Module) -> list[Site]:
    return [s for s, call in calls(tree) if name_of(call.func) == "clip_grad_norm_" and len(call.args) == 2]


def residuals(tree: ast.Module) -> list[Site]:
    """`x + f(x)` in a forward pass."""
    return [
        site
        for site in everywhere(tree)
        if isinstance(site.node, ast.BinOp)
        and isinstance(site.node.op, ast.Add)
        and "forward" in site.functions
        and isinstance(site.node.left, ast.Name)
        and isinstance(site.node.right, ast.Call)
    ]
