"""Muon (K. Jordan, 2024), which orthogonalizes the momentum of each kernel, with AdamW for the other variables."""
import heapq
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import tensorflow as tf

from .adam import AdamW
from .exclusion import is_excluded

STEPS = 2, 3  # of Newton and Schulz, five in all; each group starts from a new Gram matrix
QUINTIC = 3.4445, -4.7750, 2.0315  # coefficients of s, s^3 and s^5 for a singular value s
UPDATE = 0.2  # root mean square of an update at a learning rate of 1, about that of Adam
STACK = 2**34  # most floating-point operations of matrices that are processed together, if there are several


@dataclass(frozen=True)
class Share:
    """A worker's share of the matrices. The workers have the same gradients, and each orthogonalizes a part of them."""

    worker: int  # from 0
    workers: int
    gathered: Callable  # returns the sums over the workers of tensors that are zero on all of them but one


@tf.keras.saving.register_keras_serializable("bigbatch")
class Muon(AdamW):
    """Muon for the kernels of convolutional and dense layers, AdamW at the same learning rate for all else.

    A kernel of shape (..., in, out) is a matrix of n = product of (..., in) rows and m = out columns. With its gradient
    g, weights w and momentum v, all (n, m):

        v <- momentum * v + g
        x <- g + momentum * v                                   (Nesterov)
        x <- x / |x|                                            (Frobenius norm)
        x <- a * x + (b * x x' + c * (x x')^2) x                (five times, for n <= m; else on the transpose)
        w <- w - learning_rate * (weight_decay * w + 0.2 * sqrt(max(n, m)) * x)

    The five steps move all singular values of x towards 1 and keep its singular vectors: with a, b, c = QUINTIC, those
    from 0.003 to 1 end between 0.68 and 1.21. So an update changes a layer equally in all directions, also in those in
    which the gradients of a large batch are small, and its size does not depend on that of the gradient.

    Sources: K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024 (momentum, steps and
    coefficients); arXiv:2502.16982, section 2.2 (weight decay, and the factor 0.2 * sqrt(max(n, m)), with which the
    root mean square of an update is about 0.2 for every shape, as that of AdamW, so that both share learning rate and
    weight decay); arXiv:2505.02222 (large batches); Dao AI Lab, "Gram Newton-Schulz", 2026 (how `orthogonalized`
    computes the steps).

    Biases, gammas, betas, embeddings, depthwise kernels and variables named by `exclude` take a step of AdamW with
    beta_1, beta_2 and epsilon. A zero x gives no update apart from weight decay. An infinite or NaN gradient makes the
    weights NaN, as in LARS.

    share: the part that this worker orthogonalizes; None: all. The weights have the same bits either way.

    learning_rate: of both; a float, a schedule, or assigned before each update. momentum: of the kernels. weight_decay:
        decoupled, as in AdamW. exclude: suffixes of names, such as `dense/kernel`. These variables get no weight decay.
        Raises ValueError if no variable has one of these suffixes.
    """

    share: Share | None = None

    def __init__(self, learning_rate, momentum=0.9, weight_decay=0.0, exclude=(), beta_2=0.95, name="Muon", **options):
        super().__init__(learning_rate, weight_decay, exclude, beta_2=beta_2, name=name, **options)
        self.momentum = tf.Variable(momentum, dtype=tf.float32, trainable=False, name="momentum")

    def build(self, var_list):
        """Creates a momentum for each variable, and the second moment of AdamW for those that are no matrix."""
        self._matrices = {self._var_key(v) for v in var_list if self._is_matrix(v)}
        super().build(var_list)

    def add_variable_from_reference(self, model_variable, variable_name, *arguments, **options):
        """Overrides Keras's hook, with which AdamW creates its variables. A matrix has no second moment."""
        if variable_name == "v" and self._var_key(model_variable) in self._matrices:
            return None
        return super().add_variable_from_reference(model_variable, variable_name, *arguments, **options)

    def _is_matrix(self, variable) -> bool:
        """Whether a variable is a kernel that is orthogonalized. Of a depthwise one, `in` or `out` may be 1."""
        others = "depthwise_kernel", *self.exclude
        return (is_excluded(variable, ("kernel",)) and not is_excluded(variable, others)
                and variable.shape.rank > 1 and min(variable.shape[-2:]) > 1)

    def _prepared(self, grads_and_vars):
        """Yields (what `update_step` gets, variable): for a matrix, the new momentum and what to subtract from w."""
        matrices, others = [], []
        for gradient, variable in grads_and_vars:
            (matrices if self._var_key(variable) in self._matrices else others).append((gradient, variable))
        yield from self._orthogonal(matrices)
        yield from super()._prepared(others)

    def _orthogonal(self, grads_and_vars):
        """Yields ((new momentum, what to subtract from w), variable) for the gradient of each matrix."""
        groups = defaultdict(list)
        for gradient, variable in grads_and_vars:
            momentum = tf.cast(self.momentum, variable.dtype)
            v = momentum * self._momentums[self._index_dict[self._var_key(variable)]] + gradient
            x = tf.reshape(gradient + momentum * v, [-1, variable.shape[-1]])
            x = x if x.shape[0] <= x.shape[1] else tf.transpose(x)
            groups[(*x.shape, x.dtype)].append((x, v, variable))
        stacks = [stack for shape, members in groups.items() for stack in in_stacks(members, operations(*shape[:2]))]
        for stack, found in zip(stacks, self._all_orthogonalized([[x for x, _, _ in stack] for stack in stacks]),
                                strict=True):
            scale = UPDATE * math.sqrt(found.shape[-1]) * tf.cast(self.learning_rate, found.dtype)
            for x, (_, v, variable) in zip(tf.unstack(scale * found, len(stack)), stack, strict=True):
                x = x if x.shape[1] == variable.shape[-1] else tf.transpose(x)
                yield (v, tf.reshape(x, variable.shape)), variable

    def _all_orthogonalized(self, stacks: list[list[tf.Tensor]]) -> list[tf.Tensor]:
        """Returns the orthogonalized matrices of each stack as (matrices, n, m): the own share's, and the gathered."""
        if not self.share:
            return [orthogonalized(tf.stack(stack)) for stack in stacks]
        owners = dealt([len(stack) * operations(*stack[0].shape) for stack in stacks], self.share.workers)
        return self.share.gathered([
            orthogonalized(tf.stack(stack)) if owner == self.share.worker
            else tf.zeros([len(stack), *stack[0].shape], stack[0].dtype)
            for stack, owner in zip(stacks, owners, strict=True)])

    def update_step(self, gradient, variable):
        if self._var_key(variable) not in self._matrices:
            super().update_step(gradient, variable)
            return
        momentum, update = gradient
        self._momentums[self._index_dict[self._var_key(variable)]].assign(momentum)
        variable.assign_sub(update)

    def get_config(self):
        return super().get_config() | {"momentum": float(self.momentum.numpy())}


def orthogonalized(matrices: tf.Tensor) -> tf.Tensor:
    """Returns matrices with about the same singular vectors and singular values near 1; zero matrices stay zero.

    matrices: (..., n, m), best with n <= m. The norm is the same for any number of threads, because one thread sums
    each row.

    A step multiplies x by a polynomial p of its Gram matrix x x', of (n, n), whose next value is p x x' p. So several
    steps need x only at their start and end. A new Gram matrix after two of them keeps the error of TF32 at about 2 %.
    """
    norms = tf.norm(tf.norm(matrices, axis=-1, keepdims=True), axis=-2, keepdims=True)
    x = tf.math.divide_no_nan(matrices, norms)
    for steps in STEPS:
        gram = tf.matmul(x, x, transpose_b=True)
        product = p = _polynomial(gram)
        for _ in range(steps - 1):
            gram = tf.matmul(tf.matmul(p, gram), p)
            p = _polynomial(gram)
            product = tf.matmul(p, product)
        x = tf.matmul(product, x)
    return x


def _polynomial(gram: tf.Tensor) -> tf.Tensor:
    a, b, c = QUINTIC
    return a * tf.eye(gram.shape[-1], dtype=gram.dtype) + b * gram + c * tf.matmul(gram, gram)


def operations(n: int, m: int) -> int:
    """Returns the floating-point operations of the products of matrices in `orthogonalized`, of one (n, m)."""
    return sum(4 * n * n * m + (8 * steps - 6) * n**3 for steps in STEPS)


def in_stacks(members: list, cost: int) -> list[list]:
    """Divides matrices of one shape, of `cost` operations each, into stacks of at most STACK, or of a single matrix.

    Products of stacked matrices can have other bits than those of single ones. So the stacks are the same, however
    many workers share them.
    """
    count = math.ceil(len(members) / max(1, STACK // cost))
    return [members[index::count] for index in range(count)]


def dealt(costs: list[int], workers: int) -> list[int]:
    """Returns the worker of each stack, by longest processing time first (Graham 1969).

    The stack that costs most comes first, and each goes to the worker with the least so far.
    """
    loads = [(0, worker) for worker in range(workers)]
    owners = [0] * len(costs)
    for cost, index in sorted(((cost, index) for index, cost in enumerate(costs)), reverse=True):
        load, owners[index] = loads[0]
        heapq.heapreplace(loads, (load + cost, owners[index]))
    return owners
