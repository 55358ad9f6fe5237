/* A disk that fails on demand, for processes started with LD_PRELOAD (Linux, glibc).
 *
 * Intercepts the calls of libc that change files below one folder, counts them, and either fails the k-th one or records all of
 * them in a journal. Nothing happens before adversary_arm() is called, so one process can import its libraries once and fork
 * children that are armed differently. See shim.py for the reader of the journal.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum mode { NONE, EIO_ONCE, EIO_ALWAYS, ENOSPC_ALWAYS, HALF_WRITE, EROFS_ALWAYS, KILL };
/* Keep in step with Op in shim.py. */
enum op { OPEN = 1, WRITE, TRUNCATE, FSYNC, RENAME, UNLINK, MKDIR, RMDIR, LINK, SYMLINK, OUTPUT, UNKNOWN };

struct record {
    uint32_t magic, op, number, flags;
    uint64_t inode, offset;
    uint32_t first, second, data, reserved;
};

static char prefix[PATH_MAX];
static size_t prefix_length;
static volatile int armed;
static int journal = -1;
static char report[PATH_MAX];
static long target, count;
static enum mode mode;
static int triggered;
static pthread_mutex_t guard = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;

static void raw_write(int fd, const void *data, size_t size) {
    const char *at = data;
    while (size) {
        ssize_t done = syscall(SYS_write, fd, at, size);
        if (done <= 0) return;
        at += done, size -= (size_t)done;
    }
}

/* k: the call that fails, counted from 1; 0 for none. Files to which the journal and the place of the fault go may be empty. */
__attribute__((visibility("default"))) int adversary_arm(const char *folder, const char *journal_path, const char *report_path,
                                                         long k, int how) {
    if (strlen(folder) >= sizeof prefix || strlen(report_path) >= sizeof report) return -1;
    strcpy(prefix, folder);
    prefix_length = strlen(prefix);
    strcpy(report, report_path);
    target = k, mode = (enum mode)how, count = 0, triggered = 0;
    if (*journal_path) {
        int fd = (int)syscall(SYS_openat, AT_FDCWD, journal_path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
        if (fd < 0) return -1;
        journal = fcntl(fd, F_DUPFD_CLOEXEC, 900); /* out of the way of programs that count descriptors */
        syscall(SYS_close, fd);
    }
    armed = 1;
    return 0;
}

__attribute__((visibility("default"))) long adversary_count(void) { return count; }

static int below(const char *path) {
    return strncmp(path, prefix, prefix_length) == 0 && (path[prefix_length] == '/' || path[prefix_length] == 0);
}

/* The path as the caller means it, absolute; symbolic links are not followed. */
static int absolute(int folder, const char *path, char *out) {
    size_t length = 0;
    if (path == NULL) return 0;
    if (*path != '/') {
        if (folder == AT_FDCWD) {
            if (syscall(SYS_getcwd, out, PATH_MAX) < 0) return 0;
        } else {
            char link[64];
            snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
            ssize_t size = syscall(SYS_readlinkat, AT_FDCWD, link, out, PATH_MAX - 1);
            if (size < 0) return 0;
            out[size] = 0;
        }
        length = strlen(out);
        out[length++] = '/';
    }
    if (length + strlen(path) >= PATH_MAX) return 0;
    strcpy(out + length, path);
    return 1;
}

static int of_descriptor(int fd, char *out) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = syscall(SYS_readlinkat, AT_FDCWD, link, out, PATH_MAX - 1);
    if (size <= 0) return 0;
    out[size] = 0;
    return out[0] == '/' && below(out);
}

static uint64_t inode_of(int fd, off_t *size) {
    struct stat found;
    if (syscall(SYS_fstat, fd, &found) != 0) return 0;
    if (size) *size = found.st_size;
    return found.st_ino;
}

static void note(enum op op, uint32_t flags, uint64_t inode, uint64_t offset, const char *first, const char *second,
                 const struct iovec *parts, int many, size_t size) {
    if (journal < 0) return;
    struct record head = {0x41445653, op, (uint32_t)count, flags, inode, offset, (uint32_t)strlen(first), (uint32_t)strlen(second),
                          (uint32_t)size, 0};
    raw_write(journal, &head, sizeof head);
    raw_write(journal, first, head.first);
    raw_write(journal, second, head.second);
    for (int i = 0; i < many && size; i++) {
        size_t part = parts[i].iov_len < size ? parts[i].iov_len : size;
        raw_write(journal, parts[i].iov_base, part);
        size -= part;
    }
}

static const char *NAMES[] = {"", "open", "write", "truncate", "fsync", "rename", "unlink", "mkdir", "rmdir", "link", "symlink"};

/* Counts a call; the error it has to end with, or 0. `grows`: it needs room on the disk. HALF_WRITE answers -1 for its first write. */
static int verdict(enum op op, const char *path, int grows) {
    count++;
    if (mode == NONE || count < target) return 0;
    int first = !triggered;
    triggered = 1;
    if (first && *report) {
        int fd = (int)syscall(SYS_openat, AT_FDCWD, report, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
        raw_write(fd, NAMES[op], strlen(NAMES[op]));
        raw_write(fd, " ", 1);
        raw_write(fd, path, strlen(path));
        syscall(SYS_close, fd);
    }
    switch (mode) {
    case EIO_ONCE:
        return first ? EIO : 0;
    case EIO_ALWAYS:
        return EIO;
    case ENOSPC_ALWAYS:
        return grows ? ENOSPC : 0;
    case HALF_WRITE:
        if (first && op == WRITE) return -1;
        return grows ? ENOSPC : 0;
    case EROFS_ALWAYS:
        return op == FSYNC ? EIO : EROFS;
    case KILL:
        syscall(SYS_kill, syscall(SYS_getpid), SIGKILL);
        return EIO;
    default:
        return 0;
    }
}

#define LOCK() pthread_mutex_lock(&guard)
#define UNLOCK(value) \
    do { \
        int kept = errno; \
        pthread_mutex_unlock(&guard); \
        errno = kept; \
        return value; \
    } while (0)
#define REFUSE(error) \
    do { \
        pthread_mutex_unlock(&guard); \
        errno = error; \
        return -1; \
    } while (0)

/* ---- opening ---- */

static int do_open(int folder, const char *path, int flags, mode_t bits) {
    char whole[PATH_MAX];
    int writes = (flags & O_ACCMODE) != O_RDONLY || (flags & (O_CREAT | O_TRUNC));
    if (!armed || !writes || (flags & O_PATH) == O_PATH || !absolute(folder, path, whole) || !below(whole))
        return (int)syscall(SYS_openat, folder, path, flags, bits);
    LOCK();
    struct stat before;
    int existed = syscall(SYS_newfstatat, folder, path, &before, 0) == 0;
    int created = !existed && (flags & O_CREAT);
    int error = verdict(OPEN, whole, created);
    if (error > 0) REFUSE(error);
    int fd = (int)syscall(SYS_openat, folder, path, flags, bits);
    if (fd >= 0) {
        /* Flag 1: created; 2: emptied. */
        uint32_t what = (created ? 1u : 0u) | (existed && (flags & O_TRUNC) ? 2u : 0u);
        note(OPEN, what, inode_of(fd, NULL), 0, whole, "", NULL, 0, 0);
    }
    UNLOCK(fd);
}

#define BITS() \
    mode_t bits = 0; \
    if (flags & (O_CREAT | __O_TMPFILE)) { \
        va_list more; \
        va_start(more, flags); \
        bits = va_arg(more, mode_t); \
        va_end(more); \
    }
int open(const char *path, int flags, ...) { BITS() return do_open(AT_FDCWD, path, flags, bits); }
int open64(const char *path, int flags, ...) { BITS() return do_open(AT_FDCWD, path, flags | O_LARGEFILE, bits); }
int openat(int folder, const char *path, int flags, ...) { BITS() return do_open(folder, path, flags, bits); }
int openat64(int folder, const char *path, int flags, ...) { BITS() return do_open(folder, path, flags | O_LARGEFILE, bits); }
int __open_2(const char *path, int flags) { return do_open(AT_FDCWD, path, flags, 0); }
int __open64_2(const char *path, int flags) { return do_open(AT_FDCWD, path, flags | O_LARGEFILE, 0); }
int __openat_2(int folder, const char *path, int flags) { return do_open(folder, path, flags, 0); }
int __openat64_2(int folder, const char *path, int flags) { return do_open(folder, path, flags | O_LARGEFILE, 0); }
int creat(const char *path, mode_t bits) { return do_open(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, bits); }
int creat64(const char *path, mode_t bits) { return do_open(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, bits); }

/* stdio writes inside libc, out of reach: a stream on a descriptor of ours that is not buffered by libc at all. */
typedef struct { int fd; } stream_state;
static ssize_t stream_read(void *cookie, char *at, size_t size) { return read(((stream_state *)cookie)->fd, at, size); }
static ssize_t stream_write(void *cookie, const char *at, size_t size) {
    ssize_t done = write(((stream_state *)cookie)->fd, at, size);
    return done < 0 ? 0 : done;
}
static int stream_seek(void *cookie, off64_t *offset, int whence) {
    off64_t found = lseek64(((stream_state *)cookie)->fd, *offset, whence);
    if (found < 0) return -1;
    *offset = found;
    return 0;
}
static int stream_close(void *cookie) {
    int done = close(((stream_state *)cookie)->fd);
    free(cookie);
    return done;
}
static FILE *do_fopen(const char *path, const char *how, const char *name) {
    FILE *(*real)(const char *, const char *) = (FILE * (*)(const char *, const char *)) dlsym(RTLD_NEXT, name);
    char whole[PATH_MAX];
    if (!armed || (*how == 'r' && !strchr(how, '+')) || !absolute(AT_FDCWD, path, whole) || !below(whole)) return real(path, how);
    int flags = strchr(how, '+') ? O_RDWR : O_WRONLY;
    if (*how == 'w') flags |= O_CREAT | O_TRUNC;
    if (*how == 'a') flags |= O_CREAT | O_APPEND;
    int fd = do_open(AT_FDCWD, path, flags | O_CLOEXEC, 0666);
    if (fd < 0) return NULL;
    stream_state *state = malloc(sizeof *state);
    state->fd = fd;
    cookie_io_functions_t functions = {stream_read, stream_write, stream_seek, stream_close};
    return fopencookie(state, how, functions);
}
FILE *fopen(const char *path, const char *how) { return do_fopen(path, how, "fopen"); }
FILE *fopen64(const char *path, const char *how) { return do_fopen(path, how, "fopen64"); }

/* ---- writing ---- */

/* offset < 0: at the position of the descriptor. */
static ssize_t do_write(int fd, const struct iovec *parts, int many, off_t offset) {
    char path[PATH_MAX];
    size_t size = 0;
    for (int i = 0; i < many; i++) size += parts[i].iov_len;
#define PLAIN(p, n) (offset < 0 ? syscall(SYS_writev, fd, p, n) : syscall(SYS_pwritev, fd, p, n, offset, 0))
    if (!armed) return PLAIN(parts, many);
    if (fd == 1 || fd == 2) {
        LOCK();
        ssize_t done = PLAIN(parts, many);
        if (done > 0) note(OUTPUT, (uint32_t)fd, 0, 0, "", "", parts, many, (size_t)done);
        UNLOCK(done);
    }
    if (!of_descriptor(fd, path)) return PLAIN(parts, many);
    LOCK();
    off_t length = 0, at = offset;
    uint64_t inode = inode_of(fd, &length);
    if (at < 0) at = syscall(SYS_fcntl, fd, F_GETFL) & O_APPEND ? length : syscall(SYS_lseek, fd, 0, SEEK_CUR);
    int error = verdict(WRITE, path, at + (off_t)size > length);
    if (error > 0) REFUSE(error);
    ssize_t done;
    if (error == -1) {
        struct iovec half[many > 0 ? many : 1];
        int used = 0;
        for (size_t left = size / 2; used < many && left; used++) {
            half[used] = parts[used];
            if (half[used].iov_len > left) half[used].iov_len = left;
            left -= half[used].iov_len;
        }
        if (size / 2 == 0) REFUSE(ENOSPC);
        done = PLAIN(half, used);
    } else {
        done = PLAIN(parts, many);
    }
    if (done > 0) note(WRITE, 0, inode, (uint64_t)at, path, "", parts, many, (size_t)done);
    UNLOCK(done);
}

ssize_t write(int fd, const void *data, size_t size) {
    struct iovec part = {(void *)data, size};
    if (!armed) return syscall(SYS_write, fd, data, size);
    return do_write(fd, &part, 1, -1);
}
ssize_t writev(int fd, const struct iovec *parts, int many) { return do_write(fd, parts, many, -1); }
ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) {
    struct iovec part = {(void *)data, size};
    return do_write(fd, &part, 1, offset);
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset) { return pwrite(fd, data, size, offset); }
ssize_t pwritev(int fd, const struct iovec *parts, int many, off_t offset) { return do_write(fd, parts, many, offset); }
ssize_t pwritev64(int fd, const struct iovec *parts, int many, off64_t offset) { return do_write(fd, parts, many, offset); }
ssize_t pwritev2(int fd, const struct iovec *parts, int many, off_t offset, int flags) {
    (void)flags;
    return do_write(fd, parts, many, offset);
}
ssize_t pwritev64v2(int fd, const struct iovec *parts, int many, off64_t offset, int flags) {
    (void)flags;
    return do_write(fd, parts, many, offset);
}

/* Copies inside the kernel carry data that no journal would see: callers are sent to read and write, as on an old kernel. */
ssize_t copy_file_range(int in, off64_t *from, int out, off64_t *to, size_t size, unsigned flags) {
    char path[PATH_MAX];
    if (armed && of_descriptor(out, path)) {
        errno = EXDEV;
        return -1;
    }
    return syscall(SYS_copy_file_range, in, from, out, to, size, flags);
}
ssize_t sendfile(int out, int in, off_t *from, size_t size) {
    char path[PATH_MAX];
    if (armed && of_descriptor(out, path)) {
        errno = EINVAL;
        return -1;
    }
    return syscall(SYS_sendfile, out, in, from, size);
}
ssize_t sendfile64(int out, int in, off64_t *from, size_t size) { return sendfile(out, in, from, size); }

/* ---- lengths and syncs ---- */

int ftruncate(int fd, off_t length) {
    char path[PATH_MAX];
    if (!armed || !of_descriptor(fd, path)) return (int)syscall(SYS_ftruncate, fd, length);
    LOCK();
    off_t before = 0;
    uint64_t inode = inode_of(fd, &before);
    int error = verdict(TRUNCATE, path, length > before);
    if (error > 0) REFUSE(error);
    int done = (int)syscall(SYS_ftruncate, fd, length);
    if (done == 0) note(TRUNCATE, 0, inode, (uint64_t)length, path, "", NULL, 0, 0);
    UNLOCK(done);
}
int ftruncate64(int fd, off64_t length) { return ftruncate(fd, length); }
int truncate(const char *path, off_t length) {
    int fd = do_open(AT_FDCWD, path, O_WRONLY | O_CLOEXEC, 0);
    if (fd < 0) return -1;
    int done = ftruncate(fd, length), kept = errno;
    syscall(SYS_close, fd);
    errno = kept;
    return done;
}
int truncate64(const char *path, off64_t length) { return truncate(path, length); }

static int grow(int fd, int how, off_t offset, off_t length) {
    char path[PATH_MAX];
    if (!armed || !of_descriptor(fd, path)) return (int)syscall(SYS_fallocate, fd, how, offset, length);
    LOCK();
    off_t before = 0;
    uint64_t inode = inode_of(fd, &before);
    int error = verdict(TRUNCATE, path, 1);
    if (error > 0) REFUSE(error);
    int done = (int)syscall(SYS_fallocate, fd, how, offset, length);
    if (done == 0 && offset + length > before) note(TRUNCATE, 0, inode, (uint64_t)(offset + length), path, "", NULL, 0, 0);
    UNLOCK(done);
}
int fallocate(int fd, int how, off_t offset, off_t length) { return grow(fd, how, offset, length); }
int fallocate64(int fd, int how, off64_t offset, off64_t length) { return grow(fd, how, offset, length); }
int posix_fallocate(int fd, off_t offset, off_t length) {
    int kept = errno, error = grow(fd, 0, offset, length) == 0 ? 0 : errno;
    errno = kept;
    return error;
}
int posix_fallocate64(int fd, off64_t offset, off64_t length) { return posix_fallocate(fd, offset, length); }

static int do_sync(int fd, long number) {
    char path[PATH_MAX];
    if (!armed || !of_descriptor(fd, path)) return (int)syscall(number, fd);
    LOCK();
    int error = verdict(FSYNC, path, 0);
    if (error > 0) REFUSE(error);
    int done = (int)syscall(number, fd);
    if (done == 0) note(FSYNC, 0, inode_of(fd, NULL), 0, path, "", NULL, 0, 0);
    UNLOCK(done);
}
int fsync(int fd) { return do_sync(fd, SYS_fsync); }
int fdatasync(int fd) { return do_sync(fd, SYS_fdatasync); }

/* ---- names ---- */

static int two_names(enum op op, int grows, int from, const char *first, int to, const char *second, long number, unsigned flags) {
    char a[PATH_MAX], b[PATH_MAX];
#define CALL() (int)(number == SYS_symlinkat ? syscall(number, first, to, second) : syscall(number, from, first, to, second, flags))
    int target_below = armed && absolute(to, second, b) && below(b);
    if (!target_below) return CALL();
    if (op == SYMLINK) {
        if (strlen(first) >= PATH_MAX) return CALL();
        strcpy(a, first);
    } else if (!absolute(from, first, a)) {
        return CALL();
    }
    LOCK();
    int error = verdict(op, b, grows);
    if (error > 0) REFUSE(error);
    int done = CALL();
    if (done == 0) note(flags ? UNKNOWN : op, 0, 0, 0, a, b, NULL, 0, 0);
    UNLOCK(done);
}
int renameat2(int from, const char *a, int to, const char *b, unsigned flags) {
    return two_names(RENAME, 0, from, a, to, b, SYS_renameat2, flags);
}
int renameat(int from, const char *a, int to, const char *b) { return renameat2(from, a, to, b, 0); }
int rename(const char *a, const char *b) { return renameat2(AT_FDCWD, a, AT_FDCWD, b, 0); }
int linkat(int from, const char *a, int to, const char *b, int flags) {
    return two_names(LINK, 1, from, a, to, b, SYS_linkat, (unsigned)flags);
}
int link(const char *a, const char *b) { return linkat(AT_FDCWD, a, AT_FDCWD, b, 0); }
int symlinkat(const char *text, int to, const char *b) { return two_names(SYMLINK, 1, AT_FDCWD, text, to, b, SYS_symlinkat, 0); }
int symlink(const char *text, const char *b) { return symlinkat(text, AT_FDCWD, b); }

int unlinkat(int folder, const char *path, int flags) {
    char whole[PATH_MAX];
    struct stat found;
    /* A name that is not there does not reach the disk. */
    if (!armed || !absolute(folder, path, whole) || !below(whole) ||
        syscall(SYS_newfstatat, folder, path, &found, AT_SYMLINK_NOFOLLOW) != 0)
        return (int)syscall(SYS_unlinkat, folder, path, flags);
    LOCK();
    enum op op = flags & AT_REMOVEDIR ? RMDIR : UNLINK;
    int error = verdict(op, whole, 0);
    if (error > 0) REFUSE(error);
    int done = (int)syscall(SYS_unlinkat, folder, path, flags);
    if (done == 0) note(op, 0, 0, 0, whole, "", NULL, 0, 0);
    UNLOCK(done);
}
int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }
int remove(const char *path) {
    int done = unlink(path);
    return done != 0 && errno == EISDIR ? rmdir(path) : done;
}

int mkdirat(int folder, const char *path, mode_t bits) {
    char whole[PATH_MAX];
    struct stat found;
    if (!armed || !absolute(folder, path, whole) || !below(whole) ||
        syscall(SYS_newfstatat, folder, path, &found, AT_SYMLINK_NOFOLLOW) == 0)
        return (int)syscall(SYS_mkdirat, folder, path, bits);
    LOCK();
    int error = verdict(MKDIR, whole, 1);
    if (error > 0) REFUSE(error);
    int done = (int)syscall(SYS_mkdirat, folder, path, bits);
    if (done == 0) note(MKDIR, 0, 0, 0, whole, "", NULL, 0, 0);
    UNLOCK(done);
}
int mkdir(const char *path, mode_t bits) { return mkdirat(AT_FDCWD, path, bits); }
