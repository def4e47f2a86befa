"""LARS (arXiv:1708.03888) and SGD with momentum, on one fused kernel."""
import tensorflow as tf

from .exclusion import check_exclusion, is_excluded
from .stacks import Scaled, in_order, norms, spread, stack_order, stacked, stacks_of, unstacked


@tf.keras.saving.register_keras_serializable("bigbatch")
class SGD(tf.keras.optimizers.Optimizer):
    """SGD with momentum and coupled weight decay: the decay goes through the momentum, as in Caffe and the papers.

        g <- g + weight_decay * w
        v <- momentum * v + learning_rate * g
        w <- w - v

    These are steps 3 to 5 of arXiv:1708.03888, section 3.2.3. The learning rate is inside the momentum buffer v, so a
    new rate applies only to new gradients. Keras's own SGD decouples weight decay from momentum.

    Norms and updates are computed in the dtype of the variables, which is float32 under mixed precision, too. The
    optimizer expects gradients that are averaged over the workers and unscaled, as tensors or as optim.stacks.Scaled.

    learning_rate, momentum, weight_decay: gamma, mu and beta in arXiv:1708.03888.
    nesterov: w <- w - momentum * v - learning_rate * (g + weight_decay * w), with the updated v.
    exclude: suffixes of names, such as `bias` for `dense/bias`. These variables get no weight decay. Raises ValueError
        if no variable has one of these suffixes, because the mistake would go unnoticed.
    """

    def __init__(self, learning_rate, momentum=0.9, weight_decay=0.0, nesterov=False, exclude=(), name=None, **kwargs):
        # Keras's own weight_decay and jit_compile stay off: the first is decoupled, the second cannot compile Horovod.
        super().__init__(name=name or type(self).__name__, weight_decay=None, jit_compile=False, **kwargs)
        self._learning_rate = self._build_learning_rate(learning_rate)
        self.momentum = tf.Variable(momentum, dtype=tf.float32, trainable=False, name="momentum")
        self.coupled_weight_decay = weight_decay
        self.nesterov = nesterov
        self.exclude = tuple(exclude)

    def build(self, var_list):
        """Creates a zero-initialized buffer, which holds -v, in the shape of each variable."""
        super().build(var_list)
        if getattr(self, "_built", False):
            return
        check_exclusion(self, var_list)
        self._buffers = [self.add_variable_from_reference(v, "momentum") for v in var_list]
        self._built = True

    def is_excluded(self, variable) -> bool:
        return is_excluded(variable, self.exclude)

    def _is_plain(self, variable) -> bool:
        """Whether the variable's update is only a momentum step."""
        return self.is_excluded(variable) or not self.coupled_weight_decay

    def aggregate_gradients(self, grads_and_vars):
        """Overrides Keras's hook, which copies every gradient even if there is no tf.distribute strategy."""
        return super().aggregate_gradients(grads_and_vars) if tf.distribute.has_strategy() else grads_and_vars

    def _internal_apply_gradients(self, grads_and_vars):
        """Overrides the Keras hook that gets all gradients before `update_step`, to process them in stacks.

        Keras hands what stands in a gradient's place to `update_step` as it is. A variable's own learning rate gets
        there in a triple (gradient, learning rate, momentum).
        """
        learning_rate, momentum = (tf.cast(value, tf.float32) for value in (self.learning_rate, self.momentum))
        plain = []
        others = []
        for gradient, variable in grads_and_vars:
            (plain if self._is_plain(variable) else others).append((Scaled.of(gradient), variable))
        updates = []
        for pairs, adapted in ((plain, self._multiplied), (others, self._adapted)):
            if pairs:
                gradients, variables = zip(*pairs, strict=True)
                updates += [((gradient, rate, momentum), variable) for gradient, rate, variable in
                            zip(*adapted(gradients, variables, learning_rate), variables, strict=True)]
        return super()._internal_apply_gradients(updates)

    def _multiplied(self, gradients, variables, learning_rate):
        """Returns the tensor of each gradient, and learning rates that contain the gradients' factors."""
        factors = tf.stack([gradient.factor for gradient in gradients])
        return [gradient.tensor for gradient in gradients], tf.unstack(learning_rate * factors, len(variables))

    def _adapted(self, gradients, variables, learning_rate):
        """Returns a tensor for each variable and learning rates, whose products contain weight decay.

        A gradient is factor * tensor. Its factor goes into the rate, so what is added to the tensor is divided by it.
        """
        stacks = stacks_of(variables)
        order = stack_order(stacks)
        w = stacked(stacks, variables)
        g = stacked(stacks, [gradient.tensor for gradient in gradients])
        factors = tf.stack([gradients[position].factor for position in order])
        given = [gradients[position].norm for position in order]
        rates = self._rates(learning_rate, stacks, w, g, factors, None if None in given else tf.stack(given))
        if self.coupled_weight_decay:
            decays = spread(stacks, w, self.coupled_weight_decay / factors)
            g = [tensor + decay * weight for tensor, decay, weight in zip(g, decays, w, strict=True)]  # step 3
        return unstacked(stacks, g), in_order(stacks, tf.unstack(rates * factors, len(variables)))

    def _rates(self, learning_rate, stacks, w, g, factors, gradient_norms):
        """Returns the learning rate of each variable, in the order of the stacks, float32 (variables,).

        gradient_norms: L2 norms of factors * g, or None. All three have the order of the stacks.
        """
        return tf.fill([len(stack_order(stacks))], learning_rate)

    def update_step(self, gradient, variable):
        """Updates a variable by steps 4 and 5, in one kernel. gradient: the triple."""
        gradient, learning_rate, momentum = gradient
        buffer = self._buffers[self._index_dict[self._var_key(variable)]]
        tf.raw_ops.ResourceApplyKerasMomentum(
            var=variable.handle, accum=buffer.handle, grad=gradient, use_nesterov=self.nesterov,
            lr=tf.cast(learning_rate, variable.dtype), momentum=tf.cast(momentum, variable.dtype))

    def get_config(self):
        config = super().get_config()
        for key in ("weight_decay", "jit_compile", "is_legacy_optimizer"):
            config.pop(key, None)
        return config | {
            "learning_rate": self._serialize_hyperparameter(self._learning_rate),
            "momentum": float(self.momentum.numpy()),
            "weight_decay": self.coupled_weight_decay,
            "nesterov": self.nesterov,
            "exclude": list(self.exclude),
        }


@tf.keras.saving.register_keras_serializable("bigbatch")
class LARS(SGD):
    """Layer-wise adaptive rate scaling (arXiv:1708.03888, section 3.2.3, steps 1 to 5).

        ratio <- trust_coefficient * |w| / (|g| + weight_decay * |w| + epsilon), or 1 where |w| or |g| is zero
        rate  <- learning_rate * ratio
        g     <- g + weight_decay * w
        v     <- momentum * v + rate * g
        w     <- w - v

    At the start of AlexNet, |w| / |g| is 5.76 for the first convolution and 1,345 for the first dense layer (table 4):
    one rate is too large for the one or too small for the other. Step 1 makes each layer's update a fraction of its
    weights, and this fraction does not depend on the size of the gradient.

    The L2 norms are computed per variable. The paper's symbols: trust_coefficient is l, learning_rate gamma, momentum
    mu, weight_decay beta. trust_coefficient and momentum default to the paper's values. The paper's weight decay is
    0.0005. Step 1 of the paper prints beta * |g| in the denominator. The authors' code has beta * |w|, as here.

    clip: rate <- min(learning_rate, ratio), as in Apex. The clipped form of NVIDIA's Caffe also leaves the weight decay
        out of the denominator of the ratio.
    exclude: as in SGD. These variables have no trust ratio, either, and take a plain momentum step. jit_compile: use
    norms that XLA can compile, for updates inside Model.compile(jit_compile=True) and the like. They are slower on a
    CPU. It does not compile the optimizer itself, as Keras's argument of that name does.
    """

    def __init__(self, learning_rate, momentum=0.9, weight_decay=0.0, trust_coefficient=0.001, epsilon=0.0,
                 exclude=(), nesterov=False, name=None, jit_compile=False, clip=False, **kwargs):
        super().__init__(learning_rate, momentum, weight_decay, nesterov, exclude, name, **kwargs)
        self.clip = clip
        self.trust_coefficient = trust_coefficient
        self.epsilon = epsilon
        self._in_xla = jit_compile

    def _is_plain(self, variable):
        return self.is_excluded(variable)

    def _rates(self, learning_rate, stacks, w, g, factors, gradient_norms):
        if gradient_norms is None:
            gradient_norms = factors * norms(stacks, g, self._in_xla)
        ratios = self.trust_ratios(norms(stacks, w, self._in_xla), gradient_norms)  # step 1
        return tf.minimum(learning_rate, ratios) if self.clip else learning_rate * ratios  # step 2

    def trust_ratios(self, weight_norms, gradient_norms):
        """Returns the trust ratio of each variable, in the shape of the norms."""
        denominators = gradient_norms + self.coupled_weight_decay * weight_norms + self.epsilon
        ratios = self.trust_coefficient * tf.math.divide_no_nan(weight_norms, denominators)
        return tf.where((weight_norms > 0) & (gradient_norms > 0), ratios, tf.ones_like(ratios))

    def get_config(self):
        return super().get_config() | {
            "trust_coefficient": self.trust_coefficient, "epsilon": self.epsilon, "jit_compile": self._in_xla,
            "clip": self.clip}
