/* What FBGEMM's CUDA build links of libnvidia-ml.so.1, the NVIDIA driver's, where there is no driver (driver.py): each
 * function says that there is none. setup.py gives the library its name. */

enum { NVML_ERROR_LIBRARY_NOT_FOUND = 12 };

#define ABSENT(function)                                                                                               \
    int function(void) { return NVML_ERROR_LIBRARY_NOT_FOUND; }

ABSENT(nvmlInit_v2)
ABSENT(nvmlDeviceGetCount_v2)
ABSENT(nvmlDeviceGetHandleByIndex_v2)
ABSENT(nvmlDeviceGetNvLinkRemotePciInfo_v2)
ABSENT(nvmlDeviceGetNvLinkState)
ABSENT(nvmlDeviceGetPciInfo_v3)
