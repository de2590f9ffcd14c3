// A folder mounted over itself as a network filesystem would be: each operation that reaches its
// server waits, and is written to a log.
//
//   gcc -O2 -o delayed delayed.c $(pkg-config --cflags --libs fuse3)
//   delayed FOLDER LOG MICROSECONDS
//
// LOG gets a line for each, when it ends: o (open), l (look for a name, or stat), r (read), w (write), d
// (list a folder) or c (create, remove, rename), bytes and offset, when it began and ended (microseconds
// since 1970), the path. Names and attributes are kept for 3 s, as NFS does at least; what was read stays in
// the page cache while the file does not change.
#define FUSE_USE_VERSION 31
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fuse3/fuse.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

static int root, log_file;
static long delay_us;
static const char *folder;

static const char *in(const char *path) { return path[1] ? path + 1 : "."; }

static long now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

static void counted(char kind, long bytes, long offset, const char *path) {
    char line[8400];
    struct timespec pause = {delay_us / 1000000, delay_us % 1000000 * 1000};
    long began = now_us();
    nanosleep(&pause, NULL);
    int length = snprintf(line, sizeof line, "%c %ld %ld %ld %ld %s%s\n", kind, bytes, offset, began, now_us(), folder, path);
    if (write(log_file, line, length) != length) abort();
}

#define DO(kind, path, call) counted(kind, 0, 0, path); return (call) == -1 ? -errno : 0

static void *begin(struct fuse_conn_info *connection, struct fuse_config *config) {
    (void)connection;
    config->entry_timeout = config->attr_timeout = config->negative_timeout = 3;
    config->auto_cache = config->use_ino = 1;
    return NULL;
}
static int d_getattr(const char *path, struct stat *out, struct fuse_file_info *file) {
    if (file) return fstat(file->fh, out) == -1 ? -errno : 0;
    DO('l', path, fstatat(root, in(path), out, AT_SYMLINK_NOFOLLOW));
}
static int d_readlink(const char *path, char *out, size_t size) {
    counted('l', 0, 0, path);
    ssize_t length = readlinkat(root, in(path), out, size - 1);
    if (length == -1) return -errno;
    out[length] = 0;
    return 0;
}
static int d_access(const char *path, int mask) { return faccessat(root, in(path), mask, 0) == -1 ? -errno : 0; }
static int d_mkdir(const char *path, mode_t mode) { DO('c', path, mkdirat(root, in(path), mode)); }
static int d_unlink(const char *path) { DO('c', path, unlinkat(root, in(path), 0)); }
static int d_rmdir(const char *path) { DO('c', path, unlinkat(root, in(path), AT_REMOVEDIR)); }
static int d_symlink(const char *to, const char *path) { DO('c', path, symlinkat(to, root, in(path))); }
static int d_link(const char *from, const char *path) { DO('c', path, linkat(root, in(from), root, in(path), 0)); }
static int d_rename(const char *from, const char *to, unsigned int flags) {
    DO('c', to, renameat2(root, in(from), root, in(to), flags));
}
static int d_chmod(const char *path, mode_t mode, struct fuse_file_info *file) {
    (void)file;
    DO('c', path, fchmodat(root, in(path), mode, 0));
}
static int d_chown(const char *path, uid_t user, gid_t group, struct fuse_file_info *file) {
    (void)file;
    DO('c', path, fchownat(root, in(path), user, group, AT_SYMLINK_NOFOLLOW));
}
static int d_utimens(const char *path, const struct timespec times[2], struct fuse_file_info *file) {
    (void)file;
    DO('c', path, utimensat(root, in(path), times, AT_SYMLINK_NOFOLLOW));
}
static int d_truncate(const char *path, off_t size, struct fuse_file_info *file) {
    int fd = file ? (int)file->fh : openat(root, in(path), O_WRONLY);
    int failed = fd == -1 || ftruncate(fd, size) == -1 ? errno : 0;
    if (!file && fd != -1) close(fd);
    return -failed;
}
static int opened(const char *path, int flags, mode_t mode, struct fuse_file_info *file) {
    counted('o', 0, 0, path);
    int fd = openat(root, in(path), flags, mode);
    if (fd == -1) return -errno;
    file->fh = fd;
    return 0;
}
static int d_open(const char *path, struct fuse_file_info *file) { return opened(path, file->flags, 0, file); }
static int d_create(const char *path, mode_t mode, struct fuse_file_info *file) {
    return opened(path, file->flags | O_CREAT, mode, file);
}
static int d_read(const char *path, char *out, size_t size, off_t offset, struct fuse_file_info *file) {
    ssize_t length = pread(file->fh, out, size, offset);
    if (length == -1) return -errno;
    counted('r', length, offset, path);
    return length;
}
static int d_write(const char *path, const char *data, size_t size, off_t offset, struct fuse_file_info *file) {
    ssize_t length = file->flags & O_APPEND ? write(file->fh, data, size) : pwrite(file->fh, data, size, offset);
    if (length == -1) return -errno;
    counted('w', length, offset, path);
    return length;
}
static int d_fsync(const char *path, int data, struct fuse_file_info *file) {
    (void)path;
    return (data ? fdatasync(file->fh) : fsync(file->fh)) == -1 ? -errno : 0;
}
static int d_release(const char *path, struct fuse_file_info *file) {
    (void)path;
    close(file->fh);
    return 0;
}
static int d_statfs(const char *path, struct statvfs *out) {
    (void)path;
    return fstatvfs(root, out) == -1 ? -errno : 0;
}
static int d_readdir(const char *path, void *into, fuse_fill_dir_t fill, off_t offset,
                     struct fuse_file_info *file, enum fuse_readdir_flags flags) {
    (void)offset, (void)file, (void)flags;
    counted('d', 0, 0, path);
    int fd = openat(root, in(path), O_RDONLY | O_DIRECTORY);
    DIR *listed = fd == -1 ? NULL : fdopendir(fd);
    if (!listed) return -errno;
    for (struct dirent *each; (each = readdir(listed));) {
        struct stat kind = {.st_ino = each->d_ino, .st_mode = each->d_type << 12};
        if (fill(into, each->d_name, &kind, 0, 0)) break;
    }
    closedir(listed);
    return 0;
}

int main(int count, char **given) {
    if (count != 4) return fprintf(stderr, "usage: delayed FOLDER LOG MICROSECONDS\n"), 2;
    // Before it is mounted over.
    folder = given[1];
    root = open(folder, O_RDONLY | O_DIRECTORY);
    log_file = open(given[2], O_WRONLY | O_CREAT | O_APPEND, 0644);
    delay_us = atol(given[3]);
    if (root == -1 || log_file == -1) return perror("delayed"), 1;
    struct fuse_operations does = {
        .init = begin, .getattr = d_getattr, .readlink = d_readlink, .access = d_access, .mkdir = d_mkdir,
        .unlink = d_unlink, .rmdir = d_rmdir, .symlink = d_symlink, .link = d_link, .rename = d_rename,
        .chmod = d_chmod, .chown = d_chown, .utimens = d_utimens, .truncate = d_truncate, .open = d_open,
        .create = d_create, .read = d_read, .write = d_write, .fsync = d_fsync, .release = d_release,
        .statfs = d_statfs, .readdir = d_readdir,
    };
    char *arguments[] = {given[0], "-f", "-o", "allow_other,default_permissions,suid", given[1]};
    return fuse_main(5, arguments, &does, NULL);
}
