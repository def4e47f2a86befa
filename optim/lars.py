"""LARS, and SGD with momentum, on one fused kernel: the science of arXiv:1708.03888 in one file."""
import tensorflow as tf

BLOCK = 1024


class SGD(tf.keras.optimizers.Optimizer):
    """SGD with momentum, weight decay coupled: it goes through the momentum, as in Caffe and the papers.

        v <- momentum * v + learning_rate * (g + weight_decay * w)
        w <- w - v

    The learning rate is inside the momentum buffer (arXiv:1708.03888, section 3.2.3, steps 3 to 5), so that a change
    of rate acts on new gradients only. Keras's own SGD decouples weight decay from momentum.

    Norms and update are in float32 whatever the precision of the model, on the gradient as it is handed in: averaged
    over the workers and unscaled.

    learning_rate: gamma. momentum: mu. weight_decay: beta. nesterov: step along momentum * v' + the new term.
    exclude: suffixes of variable names (`gamma`, `beta`, `bias`) that take no weight decay. ValueError where none of
        them matches a variable: such a list would go unnoticed.
    """

    def __init__(self, learning_rate, momentum=0.9, weight_decay=0.0, nesterov=False, exclude=(), name=None, **kwargs):
        # Keras's own weight_decay and jit_compile stay off: the first is decoupled, the second cannot hold Horovod.
        super().__init__(name=name or type(self).__name__, weight_decay=None, jit_compile=False, **kwargs)
        self._learning_rate = self._build_learning_rate(learning_rate)
        self.momentum = tf.Variable(momentum, dtype=tf.float32, trainable=False, name="momentum")
        self.coupled_weight_decay = weight_decay
        self.nesterov = nesterov
        self.exclude = tuple(exclude)
        # Taking rate * decay / momentum * w off the buffer, which the kernel then multiplies by momentum, saves an
        # array of g + decay * w, and passes over memory. Zero momentum, or Nesterov's second use of g, rule it out.
        self._decay_through_buffer = momentum > 0 and not nesterov

    def build(self, var_list):
        """Makes a buffer of zeros, -v, the size of each variable."""
        super().build(var_list)
        if getattr(self, "_built", False):
            return
        if self.exclude and not any(map(self.is_excluded, var_list)):
            names = ", ".join(f"'{suffix}'" for suffix in self.exclude)
            raise ValueError(f"{type(self).__name__}: exclude names {names}, which end the name of no variable")
        self._buffers = [self.add_variable_from_reference(v, "momentum") for v in var_list]
        self._built = True

    def is_excluded(self, variable) -> bool:
        return any(_has_suffix(variable, suffix) for suffix in self.exclude)

    def update_step(self, gradient, variable):
        rate = tf.cast(self.learning_rate, variable.dtype)
        self._step(gradient, variable, rate, 0.0 if self.is_excluded(variable) else self.coupled_weight_decay)

    def _step(self, gradient, variable, rate, weight_decay):
        if isinstance(gradient, tf.IndexedSlices):
            gradient = tf.convert_to_tensor(gradient)
        buffer = self._buffers[self._index_dict[self._var_key(variable)]]
        momentum = tf.cast(self.momentum, variable.dtype)
        if weight_decay and self._decay_through_buffer:
            tf.raw_ops.ResourceApplyGradientDescent(
                var=buffer.handle, alpha=rate * weight_decay / momentum, delta=variable)
        elif weight_decay:
            gradient += weight_decay * variable
        tf.raw_ops.ResourceApplyKerasMomentum(
            var=variable.handle, accum=buffer.handle, lr=rate, grad=gradient, momentum=momentum,
            use_nesterov=self.nesterov)

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


class LARS(SGD):
    """Layer-wise adaptive rate scaling (arXiv:1708.03888, section 3.2.3).

        ratio <- trust_coefficient * |w| / (|g| + weight_decay * |w| + epsilon), or 1 where |w| or |g| is zero
        v     <- momentum * v + learning_rate * ratio * (g + weight_decay * w)
        w     <- w - v

    with the L2 norms of each variable taken on its own. The paper's symbols: trust_coefficient is l, learning_rate
    gamma, momentum mu, weight_decay beta. Defaults are the paper's. The scan's step 1 prints the second term of the
    denominator with |g|; it is the weight decay's, with |w|, as in the authors' code.

    exclude: as SGD's; those variables take no trust ratio, either: a plain momentum step.
    """

    def __init__(self, learning_rate, momentum=0.9, weight_decay=0.0, trust_coefficient=0.001, epsilon=0.0,
                 exclude=(), nesterov=False, name=None, **kwargs):
        super().__init__(learning_rate, momentum, weight_decay, nesterov, exclude, name, **kwargs)
        self.trust_coefficient = trust_coefficient
        self.epsilon = epsilon

    def update_step(self, gradient, variable):
        rate = tf.cast(self.learning_rate, variable.dtype)
        if self.is_excluded(variable):
            self._step(gradient, variable, rate, weight_decay=0.0)
        else:
            self._step(gradient, variable, rate * self.trust_ratio(gradient, variable), self.coupled_weight_decay)

    def trust_ratio(self, gradient, variable):
        """The ratio for one variable and its gradient, a scalar."""
        weight_norm = _norm(variable)
        gradient_norm = _norm(gradient)
        denominator = gradient_norm + self.coupled_weight_decay * weight_norm + self.epsilon
        ratio = self.trust_coefficient * tf.math.divide_no_nan(weight_norm, denominator)
        return tf.where((weight_norm > 0) & (gradient_norm > 0), ratio, tf.ones_like(ratio))

    def get_config(self):
        return super().get_config() | {
            "trust_coefficient": self.trust_coefficient, "epsilon": self.epsilon}


def _has_suffix(variable, suffix):
    name = variable.name.split(":")[0]
    return name == suffix or name.endswith(("/" + suffix, "_" + suffix))


def _norm(tensor):
    """The L2 norm, the same bits whatever the number of threads: workers may have different ones.

    Norms of rows of BLOCK elements, each of which one thread computes, then the norm of these, until a row is left.
    """
    values = tf.reshape(tf.convert_to_tensor(tensor), [-1])
    count = values.shape[0]
    if count <= BLOCK:  # `l2_loss` sums squares in one pass over memory; so few, by one thread
        return tf.sqrt(2 * tf.nn.l2_loss(values))
    if count % BLOCK:
        values = tf.pad(values, [[0, -count % BLOCK]])
    rows = tf.reshape(values, [-1, BLOCK])
    return _norm(tf.sqrt(tf.reduce_sum(tf.square(rows), axis=1)))
