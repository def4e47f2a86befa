"""The columns of metrics.jsonl, which has one row per evaluation. summary.json has those of the last evaluation, too.

The same names in the other logs of a run mean the same. A resumed and an undisturbed run have the same values, bit for
bit, except for images_per_second and seconds. Losses are cross-entropies in nats, except that of training with another
--loss.
"""
EPOCH = "epoch"  # epochs completed: 1, 2, ...; at the end of a training, it may be a fraction
SAMPLES = "samples"  # training samples processed so far
LEARNING_RATE = "learning_rate"  # at this epoch
MOMENTUM = "momentum"  # at this epoch
BATCH_SIZE = "batch_size"  # global, in samples, at this epoch
TRAIN_LOSS = "train_loss"  # mean over the samples since the last evaluation, while the weights change
TRAIN_TOP1 = "train_top1"  # accuracy on the same samples, as a fraction of 1
VAL_LOSS = "val_loss"  # mean over the validation set
VAL_TOP1 = "val_top1"  # fraction of the validation set whose label is the most probable class
VAL_TOP5 = "val_top5"  # fraction of the validation set whose label is among the five most probable classes
EMA = "ema_"  # prefix of the figures of the moving average of the weights, with --ema_decay alone
VIEWS = "views_"  # prefix of those of the mean logits over --evaluation_views
EMA_VAL_LOSS, EMA_VAL_TOP1 = EMA + VAL_LOSS, EMA + VAL_TOP1
VARIANTS = {  # prefix of further val_loss, val_top1 and val_top5 -> whose they are, and in short
    EMA: ("average of the weights", "average"), VIEWS: ("mean of views", "views"),
    EMA + VIEWS: ("mean of views by the average of the weights", "views by the average")}
SKIPPED = "skipped"  # training samples that rollbacks have skipped; the column is missing if there are none
WEIGHTS = "weights"  # checksum of all variables of the model, in hexadecimal
IMAGES_PER_SECOND = "images_per_second"  # of the training steps since the last evaluation, on all workers
SECONDS = "seconds"  # duration of the training so far, all processes of a resumed one

# summary.json alone:
VAL_SAMPLES = "val_samples"  # size of the validation set
VAL_TOP1_COUNT = "val_top1_count"  # validation samples behind val_top1
VAL_TOP5_COUNT = "val_top5_count"  # validation samples behind val_top5
VAL_GUESS_COUNT = "val_guess_count"  # validation samples of the most frequent class
BALANCED_TOP1 = "balanced_top1"  # mean over the classes of their recall, by the average of the weights if there is one
MACRO_F1 = "macro_f1"  # likewise of F1. Both leave out classes without validation samples
BALANCED_SAMPLES = "balanced_samples"  # number of samples whose top-1 would be as uncertain as these means
WEAKEST_CLASSES = "weakest_classes"  # up to three with the lowest recall: class, images, correct, recall
BEST = "best_"  # prefix of the last four, of top1, epoch and checkpoint, of the best evaluation

TOP5_CLASSES = 20  # number of classes from which top-5 is shown: of fewer, guessing five is often right
