plugins {
    id("com.android.application")
    kotlin("android")
}

android {
    namespace = "org.torchpi2.sample"
    compileSdk = 35
    defaultConfig {
        applicationId = "org.torchpi2.sample"
        minSdk = 28
        targetSdk = 35
    }
    compileOptions {
        sourceCompatibility = JavaVersion.VERSION_17
        targetCompatibility = JavaVersion.VERSION_17
    }
    packaging { jniLibs.useLegacyPackaging = true } // as files: the NPU's driver opens its part by path
}

kotlin { jvmToolchain(17) }

dependencies { implementation(project(":")) }
