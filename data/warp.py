"""Resampling of images by a matrix: resizing, mirroring, rotation and shear are one bilinear interpolation."""


def warped(images, row_x, row_y, size: int, device: str = "cpu", fill: float | None = None, as_float: bool = False):
    """Adds a bilinear resampling of uint8 images to a DALI graph; returns images of size x size, uint8 or float32.

    The pixel of the result with its centre at (x, y) is the image at (a x + b y + c, d x + e y + f). Coordinates are in
    pixels from the upper left corner of the image, so that the first pixel's centre is at (0.5, 0.5).

    row_x, row_y: (a, b, c) and (d, e, f) of each image, scalars of the graph or numbers. fill: value outside of the
    image. None: the border is repeated. as_float: whether the result is float32, which is not rounded.
    """
    from nvidia.dali import fn, types

    if device == "gpu":
        more = ({} if fill is None else {"fill_value": fill}) | ({"dtype": types.FLOAT} if as_float else {})
        matrix = fn.reshape(fn.stack(*row_x, *row_y), shape=[2, 3])
        return fn.warp_affine(images, matrix=matrix, size=(size, size), inverse_map=True, **more)
    border = {"border_mode": "replicate"} if fill is None else {"border_mode": "constant", "fill_value": fill}
    matrix = fn.reshape(fn.stack(*row_x, *row_y, 0.0, 0.0, 1.0), shape=[3, 3])
    images = fn.cast(images, dtype=types.FLOAT) if as_float else images
    return fn.experimental.warp_perspective(images, matrix=matrix, size=(size, size), **border)


def reflected(images, corner, size: int):
    """Adds a crop of uint8 images to a DALI graph; returns images of size x size. Nothing is resampled.

    Beyond its border, an image is mirrored at its outermost pixels, which are not repeated, as numpy.pad reflects it.

    corner: upper left corner of the crop, (down, right) in whole pixels, which may be negative.
    """
    from nvidia.dali import fn

    matrix = fn.reshape(fn.stack(1.0, 0.0, corner[1], 0.0, 1.0, corner[0], 0.0, 0.0, 1.0), shape=[3, 3])
    return fn.experimental.warp_perspective(images, matrix=matrix, size=(size, size), border_mode="reflect_101")
