/* A stand-in for NVIDIA's libnvidia-ml.so.1, with the signatures that nvidia-ml-py calls.

   The file that NVML_STAND_IN names says what it answers, in lines "KEY VALUE"; the defaults are
   those of a healthy node. "gpu1.errors 2" is about GPU 1. A value below 0 is an error:
   -3 is NVML_ERROR_NOT_SUPPORTED. The value "hang" blocks whoever asks, as a broken driver does. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct { int number, is_part; } device;
typedef unsigned int word;
typedef unsigned long long number;

static device gpus[16], parts[16];

static long long value(const char *key, long long standard) {
    const char *path = getenv("NVML_STAND_IN");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[128], found[64], text[64];
    long long answer = standard;
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "%63s %63s", found, text) == 2 && !strcmp(found, key)) {
            if (!strcmp(text, "hang"))
                for (;;) sleep(1000);
            answer = atoll(text);
        }
    if (file) fclose(file);
    return answer;
}

static long long of(device *gpu, const char *key, long long standard) {
    char name[64];
    snprintf(name, sizeof name, "gpu%d.%s", gpu->number, key);
    return value(name, standard);
}

/* Answer with a number, or with an error if it is below 0. */
#define ANSWER(type, target, found) \
    do { long long it = (found); if (it < 0) return (int)-it; *(target) = (type)it; return 0; } while (0)

int nvmlInitWithFlags(word flags) { return (int)-value("init", 0); }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return "an error that the bindings do not know"; }
int nvmlSystemGetDriverVersion(char *text, word size) { strcpy(text, "560.35.03"); return 0; }
int nvmlDeviceGetCount_v2(word *count) { ANSWER(word, count, value("gpus", 2)); }

int nvmlDeviceGetHandleByIndex_v2(word index, device **gpu) {
    if (index >= value("gpus", 2)) return 2;
    gpus[index].number = parts[index].number = (int)index;
    parts[index].is_part = 1;
    *gpu = &gpus[index];
    return (int)-of(*gpu, "handle", 0);
}

int nvmlDeviceGetHandleByUUID(const char *text, device **gpu) {
    int is_part = !strncmp(text, "MIG-", 4), status = 6;
    if (strlen(text) == 5)
        status = nvmlDeviceGetHandleByIndex_v2((word)(text[4] - 'a'), gpu);
    if (!status && is_part) *gpu = &parts[(*gpu)->number];
    return status;
}

int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device *part, device **gpu) {
    *gpu = &gpus[part->number];
    return 0;
}

int nvmlDeviceGetMaxMigDeviceCount(device *gpu, word *count) { *count = 7; return 0; }

int nvmlDeviceGetMigDeviceHandleByIndex(device *gpu, word number, device **part) {
    *part = &parts[gpu->number];
    return number ? 6 : 0;
}

int nvmlDeviceGetUUID(device *gpu, char *text, word size) {
    sprintf(text, "%s-%c", gpu->is_part ? "MIG" : "GPU", 'a' + gpu->number);
    return 0;
}

int nvmlDeviceGetCudaComputeCapability(device *gpu, int *major, int *minor) {
    *major = 9, *minor = 0;
    return 0;
}

int nvmlDeviceGetName(device *gpu, char *text, word size) {
    strcpy(text, "NVIDIA H100 80GB HBM3");
    return (int)-of(gpu, "name", 0);
}

typedef struct { char legacy[16]; word domain, bus, device, id, sub; char address[32]; } pci;

int nvmlDeviceGetPciInfo_v3(device *gpu, pci *info) {
    sprintf(info->address, "00000000:%02X:00.0", 0x3b + gpu->number);
    return 0;
}

typedef struct { number total, free, used; } memory;
typedef struct { word version; number total, reserved, free, used; } memory_v2;

int nvmlDeviceGetMemoryInfo(device *gpu, memory *found) {
    found->total = 81559ull << 20;
    long long used = of(gpu, "used1", 600); /* with what is reserved */
    ANSWER(number, &found->used, used < 0 ? used : used << 20);
}

int nvmlDeviceGetMemoryInfo_v2(device *gpu, memory_v2 *found) {
    found->total = (gpu->is_part ? 9856ull : 81559ull) << 20;
    long long used = of(gpu, gpu->is_part ? "part" : "used", 4);
    ANSWER(number, &found->used, used < 0 ? used : used << 20);
}

int nvmlDeviceGetTotalEccErrors(device *gpu, int kind, int counter, number *count) {
    ANSWER(number, count, kind == 1 && counter == 0 ? of(gpu, "errors", 0) : 77);
}

int nvmlDeviceGetRetiredPagesPendingStatus(device *gpu, word *status) {
    ANSWER(word, status, of(gpu, "retired", -3));
}

int nvmlDeviceGetRemappedRows(device *gpu, word *fine, word *bad, word *pending, word *failure) {
    *fine = *bad = 5;
    *failure = (word)of(gpu, "failure", 0);
    ANSWER(word, pending, of(gpu, "pending", 0));
}

int nvmlDeviceGetCurrentClocksThrottleReasons(device *gpu, number *reasons) {
    ANSWER(number, reasons, of(gpu, "reasons", 1));
}

typedef struct { word id, scope; long long time, latency; word type; int status; number value; } field;

int nvmlDeviceGetFieldValues(device *gpu, int count, field *fields) {
    long long found = of(gpu, "recovery", -3);
    for (int each = 0; each < count; each++) {
        fields[each].status = found < 0 ? (int)-found : 0;
        fields[each].value = (number)(found < 0 ? 0 : found);
    }
    return 0;
}

typedef struct { word pid; number used; word instance, part; } process;

int nvmlDeviceGetComputeRunningProcesses_v3(device *gpu, word *room, process *found) {
    long long pid = of(gpu, "pid", 0);
    if (pid < 0) return (int)-pid;
    if (!pid) { *room = 0; return 0; }
    if (*room < 1) { *room = 1; return 7; }
    memset(found, 0, sizeof *found);
    found->pid = (word)pid;
    *room = 1;
    return 0;
}

int nvmlDeviceGetNvLinkState(device *gpu, word link, word *active) {
    if (link >= 18) return 2;
    ANSWER(word, active, link < of(gpu, "links", 18));
}

int nvmlDeviceGetMigMode(device *gpu, word *now, word *later) { ANSWER(word, now, of(gpu, "mig", 0)); }

typedef struct { word gpu, memory; } rates;
int nvmlDeviceGetUtilizationRates(device *gpu, rates *found) {
    ANSWER(word, &found->gpu, of(gpu, "utilization", 30));
}
int nvmlDeviceGetPowerUsage(device *gpu, word *milliwatts) {
    ANSWER(word, milliwatts, of(gpu, "power", 350500));
}
int nvmlDeviceGetTemperature(device *gpu, int sensor, word *celsius) {
    ANSWER(word, celsius, of(gpu, "celsius", 61));
}
