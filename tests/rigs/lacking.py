"""A file system that lacks a call: a library, to be preloaded, in which the call fails as the variable LACKS says.

LACKS is a list such as `fsync:22 symlink:1 flock:37` of calls and error numbers, read at each call. fsync fails for
folders, and as `fsync_file` for files.
"""
import subprocess
from pathlib import Path

CALLS = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static int lacks(const char *call) {
    const char *found = getenv("LACKS");
    size_t length = strlen(call);
    while (found && (found = strstr(found, call)) && found[length] != ':')
        found += length;
    if (!found)
        return 0;
    errno = atoi(found + length + 1);
    return 1;
}

#define REAL(name) ((int (*)()) dlsym(RTLD_NEXT, name))

int fsync(int file) {
    struct stat about;
    int is_folder = !fstat(file, &about) && S_ISDIR(about.st_mode);
    return lacks(is_folder ? "fsync" : "fsync_file") ? -1 : REAL("fsync")(file);
}
int flock(int file, int operation) { return lacks("flock") ? -1 : REAL("flock")(file, operation); }
int symlink(const char *target, const char *path) { return lacks("symlink") ? -1 : REAL("symlink")(target, path); }
int symlinkat(const char *target, int folder, const char *path) {
    return lacks("symlink") ? -1 : REAL("symlinkat")(target, folder, path);
}
int chmod(const char *path, mode_t mode) { return lacks("chmod") ? -1 : REAL("chmod")(path, mode); }
"""


def library(folder: Path, compiler: str) -> Path:
    """Compiles the library in a folder. Start a process with LD_PRELOAD set to it."""
    source, made = folder / "lacking.c", folder / "lacking.so"
    source.write_text(CALLS)
    subprocess.run([compiler, "-x", "c", "-w", "-shared", "-fPIC", source, "-o", made, "-ldl"], check=True)
    return made
