/* A simulated libnvidia-ml.so.1: answers what pynvml asks, from files in the folder named by SIM_NVML_DIR.
 *
 * It owns no state of its own but the reference count of nvmlInit: every call reads the folder anew, so any process can
 * change what all others see. The files, written by state.py through rename (a reader sees the old or the new one whole):
 *
 *   gpus              one GPU a line, "key=value" separated by blanks, `name` last
 *   alloc/ID          one simulated allocation, "key=value" separated by blanks
 *   gone/ID           when somebody first saw that the process of allocation ID had ended (CLOCK_MONOTONIC, ns)
 *   faults/CALL       "hang", "slow MS" or "fail CODE" for one NVML call, or for every call if CALL is "all"
 *
 * The driver's lag counts from the first look that finds the process gone, since the kernel keeps no time of death. The
 * look is written down in gone/ for all to share; where that folder cannot be written, this process remembers it alone.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum {
    SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9,
};
enum { MAX_GPUS = 16, MAX_INSTANCES = 7, MAX_ALLOCS = 1024, TEXT = 512, ID = 256, NO_INSTANCE = -1, WHOLE = -1 };

typedef unsigned long long u64;

typedef struct { unsigned index; int instance; } Gpu; /* instance: of a card in MIG mode, or WHOLE */
typedef Gpu *Device;
typedef struct { u64 total, free, used; } Memory;
typedef struct { unsigned version; u64 total, reserved, free, used; } MemoryV2;
typedef struct { unsigned pid; u64 used; unsigned gpu_instance, compute_instance; } ProcessInfo;
typedef struct {
    char bus_legacy[16];
    unsigned domain, bus, device, pci_device, pci_subsystem;
    char bus_id[32];
} PciInfo;

typedef struct {
    char uuid[96], name[96];
    u64 total, reserved, ecc;
    unsigned minor, bus, persistence, compute_mode, instances;
} GpuState;
typedef struct { char id[ID], kind[16]; int gpu, instance, pid, show; u64 start, bytes, lag_ns; int wedged, listed; } Alloc;

static Gpu handles[MAX_GPUS], instances[MAX_GPUS][MAX_INSTANCES];
static int references;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct { char id[ID]; u64 since; } remembered[MAX_ALLOCS];

/* ---- files ------------------------------------------------------------------------------------------------ */

static void path_of(char *out, size_t size, const char *format, ...) {
    const char *folder = getenv("SIM_NVML_DIR");
    int used = snprintf(out, size, "%s/", folder && *folder ? folder : "/run/sim-nvml");
    va_list arguments;
    va_start(arguments, format);
    if (used > 0 && (size_t)used < size) vsnprintf(out + used, size - used, format, arguments);
    va_end(arguments);
}

static ssize_t slurp(const char *path, char *out, size_t size) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return -1;
    ssize_t got = read(fd, out, size - 1);
    close(fd);
    out[got > 0 ? got : 0] = 0;
    return got;
}

/* The value of KEY in a line of "key=value" pairs, or NULL; it ends at a blank that the caller knows how to stop at. */
static const char *value_of(const char *line, const char *key) {
    size_t length = strlen(key);
    for (const char *at = line; (at = strstr(at, key)); at += length)
        if ((at == line || at[-1] == ' ') && at[length] == '=') return at + length + 1;
    return NULL;
}

static u64 number_of(const char *line, const char *key, u64 otherwise) {
    const char *value = value_of(line, key);
    return value ? strtoull(value, NULL, 10) : otherwise;
}

static void word_of(const char *line, const char *key, char *out, size_t size, const char *ends) {
    const char *value = value_of(line, key);
    size_t length = value ? strcspn(value, ends) : 0;
    if (length >= size) length = size - 1;
    if (value) memcpy(out, value, length);
    out[length] = 0;
}

static int read_gpus(GpuState *out) {
    char path[TEXT], text[8192];
    path_of(path, sizeof path, "gpus");
    if (slurp(path, text, sizeof text) < 0) return -1;
    int count = 0;
    char *rest = NULL;
    for (char *line = strtok_r(text, "\n", &rest); line && count < MAX_GPUS; line = strtok_r(NULL, "\n", &rest)) {
        GpuState *gpu = &out[count++];
        gpu->total = number_of(line, "total", 0);
        gpu->reserved = number_of(line, "reserved", 0);
        gpu->ecc = number_of(line, "ecc", 0);
        gpu->minor = number_of(line, "minor", count - 1);
        gpu->bus = number_of(line, "bus", count);
        gpu->persistence = number_of(line, "persistence", 1);
        gpu->instances = number_of(line, "mig", 0);
        gpu->compute_mode = number_of(line, "compute_mode", 0);
        word_of(line, "uuid", gpu->uuid, sizeof gpu->uuid, " ");
        word_of(line, "name", gpu->name, sizeof gpu->name, "\n");
    }
    return count;
}

/* ---- processes and their lag ------------------------------------------------------------------------------ */

static u64 now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (u64)now.tv_sec * 1000000000ull + now.tv_nsec;
}

/* A process that is a zombie has given up its life but not yet its memory: the lag begins there as well. */
static int runs(int pid, u64 start) {
    char path[64], text[TEXT], state = 0;
    u64 started = 0;
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    if (slurp(path, text, sizeof text) <= 0) return errno != ENOENT && errno != ESRCH;
    const char *after = strrchr(text, ')');
    if (!after || sscanf(after + 1,
                         " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu",
                         &state, &started) != 2) return 1;
    return started == start && state != 'Z' && state != 'X';
}

static u64 remember(const char *id, u64 now) {
    int spare = 0;
    for (int i = 0; i < MAX_ALLOCS; i++) {
        if (!strcmp(remembered[i].id, id)) return remembered[i].since;
        if (remembered[i].since < remembered[spare].since) spare = i;
    }
    snprintf(remembered[spare].id, sizeof remembered[spare].id, "%s", id);
    return remembered[spare].since = now;
}

static u64 gone_since(const char *id) {
    char path[TEXT], text[64];
    u64 now = now_ns();
    path_of(path, sizeof path, "gone/%s", id);
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (fd >= 0) {
        dprintf(fd, "%llu\n", now);
        fchmod(fd, 0666); /* whatever the umask: servers of other users ask the same question */
        close(fd);
        return now;
    }
    if (errno != EEXIST) return remember(id, now);
    return slurp(path, text, sizeof text) > 0 ? strtoull(text, NULL, 10) : now;
}

/* Does this allocation still occupy the card? */
static int occupies(const Alloc *alloc) {
    if (alloc->wedged || !alloc->pid || runs(alloc->pid, alloc->start)) return 1;
    u64 since = gone_since(alloc->id); /* before the clock is read, so that no age is negative */
    return now_ns() - since < alloc->lag_ns;
}

static int read_alloc(const char *id, Alloc *out) {
    char path[TEXT], line[TEXT];
    path_of(path, sizeof path, "alloc/%s", id);
    if (slurp(path, line, sizeof line) <= 0) return 0;
    snprintf(out->id, sizeof out->id, "%s", id);
    word_of(line, "kind", out->kind, sizeof out->kind, " \n");
    out->gpu = number_of(line, "gpu", 0);
    out->instance = number_of(line, "mig", 0);
    out->pid = number_of(line, "pid", 0);
    out->show = number_of(line, "show", out->pid);
    out->start = number_of(line, "start", 0);
    out->bytes = number_of(line, "bytes", 0);
    out->lag_ns = number_of(line, "lag_ms", 200) * 1000000ull;
    out->wedged = number_of(line, "wedged", 0);
    out->listed = number_of(line, "listed", 1);
    return 1;
}

/* All allocations that occupy the card, or the instance, at this moment; the caller holds the lock. */
static int read_allocs(Device device, Alloc *out) {
    char path[TEXT];
    path_of(path, sizeof path, "alloc");
    DIR *folder = opendir(path);
    if (!folder) return 0;
    int count = 0;
    for (struct dirent *entry; count < MAX_ALLOCS && (entry = readdir(folder));)
        if (entry->d_name[0] != '.' && read_alloc(entry->d_name, &out[count]) 
            && out[count].gpu == (int)device->index
            && (device->instance == WHOLE || out[count].instance == device->instance) && occupies(&out[count]))
            count++;
    closedir(folder);
    return count;
}

/* ---- faults ----------------------------------------------------------------------------------------------- */

static int read_fault(const char *call, char *out, size_t size) {
    char path[TEXT];
    path_of(path, sizeof path, "faults/%s", call);
    if (slurp(path, out, size) > 0) return 1;
    path_of(path, sizeof path, "faults/all");
    return slurp(path, out, size) > 0;
}

static void pause_ms(long ms) {
    struct timespec rest = {ms / 1000, ms % 1000 * 1000000};
    while (nanosleep(&rest, &rest) && errno == EINTR) {}
}

/* What a fault file asks of this call: blocks as long as it says "hang" (no signal handler ends it, as in the driver). */
static int suffer(const char *call) {
    char fault[64];
    while (read_fault(call, fault, sizeof fault)) {
        if (!strncmp(fault, "fail ", 5)) return atoi(fault + 5);
        if (!strncmp(fault, "slow ", 5)) { pause_ms(atol(fault + 5)); return SUCCESS; }
        if (strncmp(fault, "hang", 4)) return SUCCESS;
        pause_ms(50);
    }
    return SUCCESS;
}

#define ENTER() do { int fault_ = suffer(__func__); if (fault_) return fault_; } while (0)
#define ENTER_OPEN() do { ENTER(); if (!references) return UNINITIALIZED; } while (0)
#define ENTER_GPU(device, gpu)                                                             \
    ENTER_OPEN();                                                                          \
    GpuState gpu;                                                                          \
    do { int found_ = state_of(device, &gpu); if (found_) return found_; } while (0)

static int state_of(Device device, GpuState *out) {
    GpuState all[MAX_GPUS];
    int count = read_gpus(all);
    int whole = device >= handles && device < handles + MAX_GPUS;
    if (!whole && (device < instances[0] || device >= instances[MAX_GPUS])) return INVALID_ARGUMENT;
    if (count <= (int)device->index) return NOT_FOUND;
    *out = all[device->index];
    if (whole) return SUCCESS;
    if ((int)out->instances <= device->instance) return NOT_FOUND;
    out->total /= out->instances;
    out->reserved /= out->instances;
    memcpy(out->uuid, "MIG", 3);
    out->uuid[16] = '1' + device->instance; /* in the second group of digits */
    return SUCCESS;
}

static int copy(char *out, unsigned length, const char *text) {
    if (strlen(text) + 1 > length) return INSUFFICIENT_SIZE;
    strcpy(out, text);
    return SUCCESS;
}

/* ---- library and system ----------------------------------------------------------------------------------- */

static int open_library(void) {
    GpuState all[MAX_GPUS];
    if (read_gpus(all) < 0) return DRIVER_NOT_LOADED;
    pthread_mutex_lock(&lock);
    for (unsigned i = 0; i < MAX_GPUS; i++) {
        handles[i] = (Gpu){i, WHOLE};
        for (int j = 0; j < MAX_INSTANCES; j++) instances[i][j] = (Gpu){i, j};
    }
    references++;
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

int nvmlInit_v2(void) { ENTER(); return open_library(); }

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    int fault = suffer("nvmlInit_v2"); /* one entry of the driver under two names */
    return fault ? fault : open_library();
}

int nvmlShutdown(void) {
    ENTER_OPEN();
    pthread_mutex_lock(&lock);
    references--;
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

const char *nvmlErrorString(int code) {
    switch (code) {
    case SUCCESS: return "Success";
    case UNINITIALIZED: return "Uninitialized";
    case INVALID_ARGUMENT: return "Invalid Argument";
    case NOT_SUPPORTED: return "Not Supported";
    case 4: return "Insufficient Permissions";
    case NOT_FOUND: return "Not Found";
    case INSUFFICIENT_SIZE: return "Insufficient Size";
    case DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case 10: return "Timeout";
    case 12: return "NVML Shared Library Not Found";
    case 13: return "Function Not Found";
    case 15: return "GPU is lost";
    case 16: return "GPU requires reset";
    case 18: return "Driver/library version mismatch";
    default: return "Unknown Error";
    }
}

int nvmlSystemGetDriverVersion(char *out, unsigned length) { ENTER_OPEN(); return copy(out, length, "580.159.04"); }
int nvmlSystemGetNVMLVersion(char *out, unsigned length) { ENTER_OPEN(); return copy(out, length, "13.580.159.04"); }
int nvmlSystemGetCudaDriverVersion_v2(int *out) { ENTER_OPEN(); *out = 13000; return SUCCESS; }
int nvmlSystemGetCudaDriverVersion(int *out) { return nvmlSystemGetCudaDriverVersion_v2(out); }

/* ---- devices ---------------------------------------------------------------------------------------------- */

int nvmlDeviceGetCount_v2(unsigned *out) {
    ENTER_OPEN();
    GpuState all[MAX_GPUS];
    int count = read_gpus(all);
    if (count < 0) return DRIVER_NOT_LOADED;
    *out = count;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device *out) {
    ENTER_OPEN();
    GpuState all[MAX_GPUS];
    if ((int)index >= read_gpus(all)) return INVALID_ARGUMENT;
    *out = &handles[index];
    return SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, Device *out) {
    ENTER_OPEN();
    GpuState all[MAX_GPUS];
    int count = read_gpus(all);
    for (int i = 0; i < count; i++)
        if (!strcmp(all[i].uuid, uuid)) { *out = &handles[i]; return SUCCESS; }
    return NOT_FOUND;
}

int nvmlDeviceGetUUID(Device device, char *out, unsigned length) { ENTER_GPU(device, gpu); return copy(out, length, gpu.uuid); }
int nvmlDeviceGetName(Device device, char *out, unsigned length) { ENTER_GPU(device, gpu); return copy(out, length, gpu.name); }
int nvmlDeviceGetIndex(Device device, unsigned *out) { ENTER_GPU(device, gpu); *out = device->index; return SUCCESS; }
int nvmlDeviceGetMinorNumber(Device device, unsigned *out) { ENTER_GPU(device, gpu); *out = gpu.minor; return SUCCESS; }
int nvmlDeviceGetPersistenceMode(Device device, unsigned *out) { ENTER_GPU(device, gpu); *out = gpu.persistence; return SUCCESS; }
int nvmlDeviceGetComputeMode(Device device, unsigned *out) { ENTER_GPU(device, gpu); *out = gpu.compute_mode; return SUCCESS; }

int nvmlDeviceGetMigMode(Device device, unsigned *current, unsigned *pending) {
    ENTER_GPU(device, gpu);
    *current = *pending = gpu.instances > 0;
    return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(Device device, unsigned *out) {
    ENTER_GPU(device, gpu);
    *out = MAX_INSTANCES;
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(Device device, unsigned index, Device *out) {
    ENTER_GPU(device, gpu);
    if (device->instance != WHOLE || index >= MAX_INSTANCES) return INVALID_ARGUMENT;
    if (index >= gpu.instances) return NOT_FOUND;
    *out = &instances[device->index][index];
    return SUCCESS;
}

int nvmlDeviceGetEccMode(Device device, unsigned *current, unsigned *pending) {
    ENTER_GPU(device, gpu);
    *current = *pending = 1;
    return SUCCESS;
}

/* error_type 1 is "uncorrected", counter_type 0 is "volatile": the only pair that `ecc=` of a GPU stands for. */
int nvmlDeviceGetTotalEccErrors(Device device, unsigned error_type, unsigned counter_type, u64 *out) {
    ENTER_GPU(device, gpu);
    *out = error_type == 1 && counter_type == 0 ? gpu.ecc : 0;
    return SUCCESS;
}

int nvmlDeviceGetPciInfo_v3(Device device, PciInfo *out) {
    ENTER_GPU(device, gpu);
    memset(out, 0, sizeof *out);
    out->bus = gpu.bus;
    out->pci_device = 0x233510de;
    snprintf(out->bus_legacy, sizeof out->bus_legacy, "0000:%02X:00.0", gpu.bus & 0xff);
    snprintf(out->bus_id, sizeof out->bus_id, "00000000:%02X:00.0", gpu.bus & 0xff);
    return SUCCESS;
}

/* ---- memory and processes --------------------------------------------------------------------------------- */

static u64 held(Device device, u64 most) {
    static Alloc allocs[MAX_ALLOCS];
    u64 sum = 0;
    pthread_mutex_lock(&lock);
    int count = read_allocs(device, allocs);
    for (int i = 0; i < count; i++) sum += allocs[i].bytes;
    pthread_mutex_unlock(&lock);
    return sum < most ? sum : most;
}

/* The first version counts the driver's reserve as used, the second tells the two apart. */
int nvmlDeviceGetMemoryInfo(Device device, Memory *out) {
    ENTER_GPU(device, gpu);
    out->total = gpu.total;
    out->used = gpu.reserved + held(device, gpu.total - gpu.reserved);
    out->free = out->total - out->used;
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo_v2(Device device, MemoryV2 *out) {
    ENTER_GPU(device, gpu);
    out->total = gpu.total;
    out->reserved = gpu.reserved;
    out->used = held(device, gpu.total - gpu.reserved);
    out->free = out->total - out->reserved - out->used;
    return SUCCESS;
}

static void add(ProcessInfo *list, unsigned *count, unsigned pid, u64 bytes) {
    for (unsigned i = 0; pid && i < *count; i++)
        if (list[i].pid == pid) { list[i].used += bytes; return; }
    list[(*count)++] = (ProcessInfo){pid, bytes, NO_INSTANCE, NO_INSTANCE};
}

static int list_processes(Device device, const char *kind, unsigned *count, ProcessInfo *out) {
    static Alloc allocs[MAX_ALLOCS];
    static ProcessInfo list[MAX_ALLOCS];
    unsigned found = 0, room = *count;
    pthread_mutex_lock(&lock);
    int all = read_allocs(device, allocs);
    for (int i = 0; i < all; i++)
        if (!allocs[i].wedged && allocs[i].listed && !strcmp(allocs[i].kind, kind))
            add(list, &found, allocs[i].show, allocs[i].bytes);
    *count = found;
    int fits = found <= room && (out || !found);
    if (fits && found) memcpy(out, list, found * sizeof *out);
    pthread_mutex_unlock(&lock);
    return fits ? SUCCESS : INSUFFICIENT_SIZE;
}

int nvmlDeviceGetComputeRunningProcesses_v3(Device device, unsigned *count, ProcessInfo *out) {
    ENTER_GPU(device, gpu);
    return list_processes(device, "compute", count, out);
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(Device device, unsigned *count, ProcessInfo *out) {
    ENTER_GPU(device, gpu);
    return list_processes(device, "graphics", count, out);
}

int nvmlDeviceGetMPSComputeRunningProcesses_v3(Device device, unsigned *count, ProcessInfo *out) {
    ENTER_GPU(device, gpu);
    return list_processes(device, "mps", count, out);
}
