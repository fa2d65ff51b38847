// The library as an AAR, with the native library that CMakeLists.txt builds. Properties (-PNAME=...):
//   executorchSource   ExecuTorch v1.5.1 with its submodules, in a folder named executorch
//   qnnSdk             Qualcomm's SDK, for bundles of their NPU; without it none of them
// `make runner` first: it fetches what is in build/deps. No Gradle has read this yet: docs/ANDROID.md.
plugins {
    id("com.android.library")
    kotlin("android")
}

val repository = projectDir.parentFile.parentFile

android {
    namespace = "org.torchpi2"
    compileSdk = 35
    defaultConfig {
        minSdk = 28
        consumerProguardFiles("consumer-rules.pro")
        ndk { abiFilters += "arm64-v8a" }
        externalNativeBuild {
            cmake {
                targets += "torch_pi2"
                arguments += listOf(
                    "-DANDROID_STL=c++_static",
                    "-DPI2_DEPENDENCIES=$repository/build/deps",
                    "-DEXECUTORCH_SOURCE=${providers.gradleProperty("executorchSource").get()}",
                )
                providers.gradleProperty("qnnSdk").orNull?.let { arguments += "-DQNN_SDK_ROOT=$it" }
            }
        }
    }
    externalNativeBuild {
        cmake {
            path = file("CMakeLists.txt")
            version = "3.28.0+"
        }
    }
    compileOptions {
        sourceCompatibility = JavaVersion.VERSION_17
        targetCompatibility = JavaVersion.VERSION_17
    }
}

kotlin { jvmToolchain(17) }

dependencies {
    api("org.jetbrains.kotlinx:kotlinx-coroutines-android:1.10.1") // Flow is in what the library offers
}
